"""Find the C compiler and run it with a deadline."""

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from native.cache import NoNative

FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC")  # never -march=native: a cache may be shared by unlike machines
_SAID_MAX = 300


class Parts(Protocol):
    """What a library is compiled of; native.recipe.Recipe."""

    @property
    def flags(self) -> tuple[str, ...]: ...

    @property
    def libraries(self) -> tuple[str, ...]: ...

    def paths(self) -> tuple[Path, ...]:
        """Return the sources' paths."""
        ...


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: its command, and a stamp that changes when it is replaced."""

    command: tuple[str, ...]
    stamp: str

    def build(self, parts: Parts, target: Path, *, environ: Mapping[str, str], deadline: float) -> None:
        """Compile the sources into one shared library. Raises NoNative, with what the compiler said."""
        command = [*self.command, *parts.flags, "-o", str(target), *map(str, parts.paths()), *parts.libraries]
        # Its temporary files go beside the target: /tmp may be read-only where the cache is not.
        child_environ = {**environ, "TMPDIR": str(target.parent), "LC_ALL": "C"}
        try:
            code, said = _run(command, child_environ, deadline - time.monotonic())
        except OSError as error:
            raise NoNative(f"{self.command[0]} cannot be run: {error}") from error
        if code != 0 or not target.exists():
            raise NoNative(f"{shlex.join(self.command)} ended with {code}: {' '.join(said.split())[:_SAID_MAX]}")


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
    """Return the compiler of $CC, else the first of cc, gcc, clang on the path; None without one.

    Raises NoNative for a $CC that is not there.
    """
    wanted = environ.get("CC", "").strip()
    try:
        candidates: Sequence[Sequence[str]] = [shlex.split(wanted)] if wanted else [["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise NoNative(f"CC={wanted!r} is no command: {error}") from error
    for name, *arguments in candidates:
        path = shutil.which(name, path=environ.get("PATH", os.defpath))
        if path is not None:
            return Compiler((path, *arguments), _stamp(path, arguments))
    if wanted:
        raise NoNative(f"CC={wanted} is not on the path")
    return None


def _stamp(path: str, arguments: Sequence[str]) -> str:
    """Path, size and time stand for the version: asking for it would cost every start a process."""
    real = os.path.realpath(path)
    found = os.stat(real)
    facts = repr((real, found.st_size, found.st_mtime_ns, *arguments))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    child = subprocess.Popen(  # noqa: S603  the user's own compiler on our own source
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    with child:
        try:
            said, _ = child.communicate(timeout=max(0.0, timeout_s))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # a compiler is several processes
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoNative(f"{shlex.join(command)} did not end within its time") from error
            raise
    return child.returncode, said
