"""Format a table as plain text: columns as wide as their widest cell, no terminal control characters."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the table, header first."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def printable(text: str) -> str:
    """Return `text` with a question mark for each unprintable character."""
    return "".join(char if char.isprintable() else "?" for char in text)


def on_or_off(value: bool | None) -> str:
    """Format a flag that may be unknown."""
    return "-" if value is None else "on" if value else "off"
