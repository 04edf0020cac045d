"""Find the C compiler, and compile a library's sources in parallel."""

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from native.cache import BuildFailed, NoNative
from native.jobs import Limits, run_jobs

FLAGS = ("-std=c11", "-O3", "-fPIC")  # never -march=native: different machines may share a cache


class Parts(Protocol):
    """The inputs of a compilation; implemented by native.recipe.Recipe."""

    @property
    def flags(self) -> tuple[str, ...]: ...

    @property
    def libraries(self) -> tuple[str, ...]: ...

    def paths(self) -> tuple[Path, ...]:
        """Return the sources' paths."""
        ...


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: its command, and a fingerprint that changes when it is replaced."""

    command: tuple[str, ...]
    fingerprint: str

    def build(self, parts: Parts, target: Path, *, environ: Mapping[str, str], limits: Limits) -> None:
        """Compile the sources, one process per core, and link them into `target`; other files go into its folder.

        Raises BuildFailed, with the compiler's output; NoNative and BuildStopped as run_jobs does.
        """
        folder = target.parent
        # Its temporary files go beside the target: /tmp may be read-only where the cache is not.
        child_environ = {**environ, "TMPDIR": str(folder), "LC_ALL": "C"}
        start, sources = [*self.command, *parts.flags], parts.paths()
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        for commands in (
            [[*start, "-c", "-o", made, str(source)] for made, source in zip(objects, sources, strict=True)],
            [[*start, "-shared", "-o", str(target), *objects, *parts.libraries]],
        ):
            cores = len(os.sched_getaffinity(0))
            run_jobs(commands, child_environ, at_once=cores, limits=limits)
        if not target.exists():
            raise BuildFailed(f"{shlex.join(self.command)} exited with 0 but wrote no library")


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
    """Return the compiler of $CC, else the first of cc, gcc, clang on the path; None without one.

    Raises NoNative for a $CC that does not exist.
    """
    wanted = environ.get("CC", "").strip()
    try:
        candidates: Sequence[Sequence[str]] = [shlex.split(wanted)] if wanted else [["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise NoNative(f"CC={wanted!r} is not a command: {error}") from error
    for name, *arguments in candidates:
        path = shutil.which(name, path=environ.get("PATH", os.defpath))
        if path is not None:
            return Compiler((path, *arguments), _fingerprint(path, arguments))
    if wanted:
        raise NoNative(f"CC={wanted} is not on the path")
    return None


def _fingerprint(path: str, arguments: Sequence[str]) -> str:
    """Return a digest of path, size and time, not of the version: that would take another process at every start."""
    real = os.path.realpath(path)
    found = os.stat(real)
    facts = repr((real, found.st_size, found.st_mtime_ns, *arguments))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
