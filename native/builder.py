"""Build a library once, cache it, and open it.

    native/*.c, *.h --compiler--> <cache>/native/<name>-<key>-<compiler's fingerprint>.so --dlopen, self-check--> T

    find_library     uses a cached library, or starts a child that builds it (native/background.py); never waits
    build_library    builds in this process if needed

Instructions beyond the platform's baseline are selected at run time. Without a compiler, a library built earlier from
the same sources is used. If there is none, if a build failed, or with PDSERVE_NATIVE=off, callers do the work in
Python. A library built in the background is used from the next start: within one run the arithmetic does not change.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from native.background import Build, start_build
from native.cache import (
    BuildFailed,
    NoNative,
    building,
    draft_folder,
    exists_and_is_own,
    library_folder,
    replace_atomically,
    try_lock,
)
from native.compiler import Compiler, find_compiler
from native.jobs import Limits
from native.recipe import Recipe

VARIABLE = "PDSERVE_NATIVE"
BUILD_TIMEOUT_S = 600.0  # 18 s of CPU time on one core; a busy machine may give only a thirtieth of a core
T = TypeVar("T")

_log = logging.getLogger("pdserve.native")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A library, or why there is none now.

    `is_awaited`: it is being built, by this process's child (`build`) or another's, for the next start.
    """

    library: T | None
    reason: str = ""
    is_awaited: bool = False
    build: Build | None = None


def find_library(recipe: Recipe[T], environ: Mapping[str, str]) -> Found[T]:
    """Return the library if it is built; otherwise start building it in the background, and log that.

    Nothing is logged with PDSERVE_NATIVE=off. Raises ValueError for values other than on and off.
    """
    wanted = environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={wanted}: choose on or off")
    if wanted == "off":
        return Found(None, f"{VARIABLE}=off")
    try:
        found = _find(_Place.of(recipe, environ), environ)
    except NoNative as error:
        _warn(recipe.name, str(error))
        return Found(None, str(error))
    if found.is_awaited:
        _log.info("native_building library=%s used_from=next_start reason=%s", recipe.name, json.dumps(found.reason))
    return found


def is_built(recipe: Recipe[T], environ: Mapping[str, str]) -> bool:
    """Return whether the library is built and works. Raises NoNative if it is not and cannot be built."""
    return _Place.of(recipe, environ).open() is not None


def build_library(recipe: Recipe[T], environ: Mapping[str, str], *, timeout_s: float = BUILD_TIMEOUT_S) -> T:
    """Return the opened library, built if it is not cached; a build that failed before is tried again.

    Raises NoNative.
    """
    place, deadline = _Place.of(recipe, environ), time.monotonic() + timeout_s
    library = place.open()
    if library is not None:
        return library
    try:
        with building(place.folder, recipe.name, deadline):
            return place.build(environ, Limits(deadline))
    except OSError as error:
        raise NoNative(f"{place.folder} cannot be written: {error}") from error


def build_locked(recipe: Recipe[T], environ: Mapping[str, str], limits: Limits) -> T:
    """Like build_library, for a caller that holds the lock. Raises NoNative, OSError."""
    return _Place.of(recipe, environ).build(environ, limits)


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
    """The path of a recipe's library, and the compiler that builds it."""

    recipe: Recipe[T]
    folder: Path
    compiler: Compiler | None
    path: Path | None  # None: no compiler, and no library built earlier

    @classmethod
    def of(cls, recipe: Recipe[T], environ: Mapping[str, str]) -> "_Place[T]":
        """Raises NoNative for a $CC that does not exist."""
        folder, compiler = library_folder(environ), find_compiler(environ)
        stem = f"{recipe.name}-{recipe.key()}"
        if compiler is not None:
            return cls(recipe, folder, compiler, folder / f"{stem}-{compiler.fingerprint}.so")
        return cls(recipe, folder, None, next(iter(sorted(folder.glob(f"{stem}-*.so"))), None))

    def open(self) -> T | None:
        """Return the library; None if it has to be built. Raises NoNative if it is unusable and cannot be built."""
        try:
            if self.path is not None and exists_and_is_own(self.folder) and exists_and_is_own(self.path):
                return self.recipe.open(self.path)
        except NoNative:
            if self.compiler is None or not exists_and_is_own(self.folder):
                raise
            # Only the file is bad: the caller rebuilds it.
        if self.compiler is None:
            raise NoNative("there is no C compiler (CC, cc, gcc, clang)")
        return None

    def build(self, environ: Mapping[str, str], limits: Limits) -> T:
        """Build and open it; the caller holds the lock. Raises NoNative, OSError."""
        assert self.compiler is not None
        assert self.path is not None
        try:
            if exists_and_is_own(self.path):  # another process was faster
                return self.recipe.open(self.path)
        except NoNative:
            self.path.unlink()
        with draft_folder(self.folder, self.recipe.name) as folder:
            draft = folder / self.path.name
            try:
                self.compiler.build(self.recipe, draft, environ=environ, limits=limits)
                draft.chmod(0o700)
                self._check(draft)
            except BuildFailed as error:
                self._failure_path.write_text(f"{error}\n", encoding="utf-8")
                raise
            replace_atomically(draft, self.path)
        self._failure_path.unlink(missing_ok=True)
        return self.recipe.open(self.path)

    def why_failed(self) -> str | None:
        """Return why the last build failed, None if none did with these sources and this compiler."""
        try:
            return self._failure_path.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None

    @property
    def _failure_path(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".failed")

    def _check(self, draft: Path) -> None:
        try:
            self.recipe.open(draft)
        except NoNative as error:
            raise BuildFailed(str(error)) from error


def _find(place: _Place[T], environ: Mapping[str, str]) -> Found[T]:
    library = place.open()
    if library is not None:
        return Found(library)
    failed = place.why_failed()
    if failed is not None:
        raise NoNative(f"the build failed before (`python -m native.build` tries again): {failed}")
    try:
        lock = try_lock(place.folder, place.recipe.name)
        return _start(place, environ, lock) if lock is not None else Found(None, "another process is building it", True)
    except OSError as error:
        raise NoNative(f"{place.folder} cannot be written: {error}") from error


def _start(place: _Place[T], environ: Mapping[str, str], lock: int) -> Found[T]:
    try:
        library = place.open()  # the previous owner of the lock may have built it
        if library is not None:
            return Found(library)
        build = start_build(place.recipe.name, lock, environ, lambda reason: _log_end(place.recipe.name, reason))
    finally:
        os.close(lock)  # the child has its own descriptor
    return Found(None, "it was not built yet", is_awaited=True, build=build)


def _log_end(name: str, reason: str | None) -> None:
    if reason is None:
        _log.info("native_built library=%s used_from=next_start", name)
    else:
        _warn(name, reason)


def _warn(name: str, reason: str) -> None:
    _log.warning("native_unavailable library=%s reason=%s", name, json.dumps(" ".join(reason.split())))
