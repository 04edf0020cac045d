"""Redact URLs for printing: without the query, which may be a credential, and without user and password."""

import html
import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

HIDDEN = "(hidden)"
_URL = re.compile(
    r"(?P<scheme>https?:[/\\]*|[a-z][a-z0-9+.-]*://)(?P<authority>[^/?#\\]*)(?P<path>[^?#]*)(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_PLAIN_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d*)?")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s<>\"']+")
_MIN_CHARS = 6
_MAX_CHARS = 300


def redacted(url: str) -> str:
    """Return `url` with its query, its fragment and the text before an @ hidden; a local path is unchanged.

    Never fails: an invalid URL loses everything after its scheme.
    """
    parts = _URL.fullmatch(url)
    if parts is None:
        return url
    _, at, host = parts["authority"].rpartition("@")
    if not _PLAIN_HOST.fullmatch(host):
        return f"{parts['scheme']}{HIDDEN}"
    rest = f"{parts['rest'][0]}{HIDDEN}" if len(parts["rest"]) > 1 else parts["rest"]
    return f"{parts['scheme']}{HIDDEN if at else ''}{at}{host}{parts['path']}{rest}"


def redacted_text(text: str, url: str) -> str:
    """Return a server's `text` for printing: one line of at most 300 characters without the secrets of `url`.

    A server may repeat the query of its request, whole, in parts, decoded or as XML.
    """
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _URL_IN_TEXT.sub(lambda found: redacted(found[0]), text)
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…"


def _secrets(url: str) -> Iterator[str]:
    """Yield the values of the query and the text before an @, in each form in which a server may repeat them."""
    before, _, query = url.partition("?")
    found = [query, before.partition("://")[2].rpartition("@")[0]]
    for pair in query.split("&"):
        value = pair.partition("=")[2]
        found += [value, unquote(value), unquote_plus(value), unquote(value).partition("/")[0]]
    for value in found:
        if len(value) >= _MIN_CHARS:
            yield from (value, html.escape(value))
