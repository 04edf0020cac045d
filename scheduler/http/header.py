"""Look up a header of a request: starlette's mapping costs 10 times as much for the few that are read."""

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header, None without it; `name` in lower case, as servers send them."""
    for one, value in scope["headers"]:
        if one == name:
            return str(value, "latin-1")
    return None


def whole_header(scope: Scope, name: bytes) -> str | None:
    """Return a header as `header_of` does, with the values of all its lines, separated by commas."""
    values = [str(value, "latin-1") for one, value in scope["headers"] if one == name]
    return ", ".join(values) if values else None
