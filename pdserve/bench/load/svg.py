"""Write a picture as SVG."""

from html import escape

from pdserve.bench.load.shapes import Box, Label, Path, Picture, Shape


def to_svg(picture: Picture) -> bytes:
    """Return the file's bytes."""
    size = f'width="{picture.width}" height="{picture.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {picture.width} {picture.height}"'
    lines = [f'{head} font-family="sans-serif">', f'<rect {size} fill="white"/>', *map(_element, picture.shapes)]
    return "\n".join([*lines, "</svg>", ""]).encode()


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
            border = "" if shape.border is None else f' stroke="{shape.border}"'
            return f'<rect {place} fill="{shape.fill or "none"}"{border}/>'
        case Path():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width}"/>'
        case Label():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size}"'
            return f'<text {place} fill="{shape.colour}">{escape(shape.words)}</text>'
