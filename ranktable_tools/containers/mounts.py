"""The allowed mounts of the guide's containers: nothing over /home/ma-user, which the image needs. Pure."""

import posixpath
from dataclasses import dataclass

from ranktable_tools.errors import RanktableError

HOME = "/home/ma-user"


@dataclass(frozen=True, slots=True)
class Mount:
    """One `-v source:target[:mode]`."""

    source: str
    target: str
    mode: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.source, self.target, self.mode) if part)


def own_mount(flag: str, source: str, target: str, mode: str = "") -> Mount:
    """Return a requested mount. Raises RanktableError naming the flag, the path and what it would hide."""
    for path in (source, target):
        if not path.startswith("/") or ":" in path or "\n" in path:
            raise RanktableError(f"{flag} {path!r}: must be an absolute path without a colon")
    inside = _plain_path(target)
    if _contains(inside, HOME) or _contains(HOME, inside):
        raise RanktableError(
            f"{flag} {target}: a mount there would hide {HOME}, the image's home folder, and break it: "
            "choose a folder outside it, like /work"
        )
    return Mount(source, target, mode)


def parse_mount(flag: str, text: str) -> Mount:
    """Parse `HOST:CONTAINER` or `HOST:CONTAINER:ro`. Raises RanktableError as own_mount does."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise RanktableError(f"{flag} {text!r}: write HOST:CONTAINER or HOST:CONTAINER:ro")
    return own_mount(flag, source, target, mode)


def _plain_path(path: str) -> str:
    """Return the normalised path in the container: no dots, single slashes."""
    return "/" + posixpath.normpath(path).lstrip("/")


def _contains(folder: str, path: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")
