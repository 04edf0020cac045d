"""Hide secret values wherever they occur in printed text."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_FILE_NAME = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)
_PROXY_NAME = re.compile(r"proxy$", re.IGNORECASE)
_URL = re.compile(r"\S+://\S+")
_MIN_CHARS = 6
_MAX_FILE_BYTES = 4096
HIDDEN = "(hidden)"


def secret_values(environ: Mapping[str, str], files: Iterable[Path]) -> tuple[str, ...]:
    """Return what must not be printed: values of variables named like a secret, URLs' passwords, secret files' content.

    Variables that name a file are not secret, nor are values below six characters: hiding those would hide half
    of any text.
    """
    named = [value for name, value in environ.items() if _SECRET_NAME.search(name) and not _FILE_NAME.search(name)]
    proxies = [value for name, value in environ.items() if _PROXY_NAME.search(name)]
    urls = [url for value in environ.values() for url in _URL.findall(value)]
    found = [*named, *map(_url_password, (*proxies, *urls)), *map(_read_start, files)]
    return tuple(sorted({value for value in found if len(value) >= _MIN_CHARS}, key=len, reverse=True))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without these values, which are sorted longest first in case one contains another."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _url_password(url: str) -> str:
    try:
        return urlsplit(url if "://" in url else f"http://{url}").password or ""
    except ValueError:
        return url


def _read_start(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
