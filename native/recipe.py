"""The inputs of a library's build, and a key that changes with any of them."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from native.compiler import FLAGS

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[T]):
    """One shared library: its C sources, in this folder, and how a built one is opened.

    `open` checks that the library works. Raises NoNative if it does not.
    """

    name: str
    sources: tuple[str, ...]
    open: Callable[[Path], T]
    flags: tuple[str, ...] = FLAGS
    libraries: tuple[str, ...] = ()

    def paths(self) -> tuple[Path, ...]:
        """Return the sources' paths."""
        return tuple(FOLDER / source for source in self.sources)

    def key(self) -> str:
        """Return the build's key: a digest of the sources, our headers they include, flags and platform."""
        facts = [*self.flags, *self.libraries, os.uname().machine]
        facts.append(getattr(sys.implementation, "_multiarch", sys.platform))
        key = hashlib.sha256(repr(facts).encode())
        for name, content in sorted(_with_headers(self.sources)):
            key.update(f"{name} {len(content)}\n".encode() + content)
        return key.hexdigest()[:16]


def _with_headers(sources: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the sources and of all our files they include, each once."""
    pending, seen = list(sources), set(sources)
    while pending:
        name = pending.pop()
        content = (FOLDER / name).read_bytes()
        yield name, content
        included = {found.decode() for found in _INCLUDE.findall(content)} - seen
        seen |= included
        pending += sorted(included)
