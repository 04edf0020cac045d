"""Write a picture as PNG with Pillow: `pip install 'pdserve[plot]'`."""

import importlib.util
import io

from pdserve.bench.load.shapes import Box, Label, Path, Picture
from wire.errors import ConfigError

SCALE = 2  # file pixels per picture pixel
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def require_png() -> None:
    """Raise ConfigError if PNG cannot be written."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("a PNG needs Pillow: pip install 'pdserve[plot]', or give a file that ends in .svg")


def to_png(picture: Picture) -> bytes:
    """Return the file's bytes. Raises ConfigError without Pillow."""
    require_png()
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (SCALE * picture.width, SCALE * picture.height), "white")
    pen = ImageDraw.Draw(image)
    for shape in picture.shapes:
        match shape:
            case Box():
                corners = (shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
                pen.rectangle([SCALE * value for value in corners], fill=shape.fill, outline=shape.border)
            case Path():
                points = [(SCALE * x, SCALE * y) for x, y in shape.points]
                pen.line(points, fill=shape.colour, width=max(1, round(SCALE * shape.width)))
            case Label():
                font, place = ImageFont.load_default(SCALE * shape.size), (SCALE * shape.x, SCALE * shape.y)
                pen.text(place, shape.words, fill=shape.colour, font=font, anchor=_ANCHORS[shape.anchor])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
