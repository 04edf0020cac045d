"""Convert a regex in Python's syntax to that of Rust's regex library, which llguidance uses. Pure.

A converted class matches the same characters as Python's or fewer, so `re.fullmatch` accepts every text that the
converted regex matches. `\\d \\w \\s` are ASCII; their negations exclude what either library includes in the class.
"""

import re

_CLASSES = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[ \t\n\r\x0b\x0c]",
    "D": r"[^\p{Nd}]",
    "W": r"[^\w\p{N}]",
    "S": r"[^\s\x1c-\x1f]",
}
_PIECE = re.compile(r"\\(?P<escaped>.)|(?P<upto>\{,(?P<most>\d+)\})|(?P<sign>[\[\]])|.", re.DOTALL)


def to_rust(pattern: str) -> str:
    """Return `pattern` with its classes, and `{,n}` outside of classes, in Rust's form."""
    written, in_class = [], False
    for found in _PIECE.finditer(pattern):
        piece = found.group()
        if found["escaped"] is not None:
            piece = _CLASSES.get(found["escaped"], piece)
        elif found["upto"] is not None and not in_class:
            piece = f"{{0,{found['most']}}}"
        elif found["sign"] is not None:
            in_class = piece == "["
        written.append(piece)
    return "".join(written)
