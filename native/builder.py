"""Build a library once, keep it, open it.

    native/*.c, *.h --compiler--> <cache>/native/<name>-<key>-<compiler's stamp>.so --dlopen, self-check--> T

Instructions beyond the platform's least are chosen when a function runs. Without a compiler a library that one built
earlier from the same sources is taken. PDSERVE_NATIVE=off, no compiler, a failed build: there is no library, and
callers do the work in Python.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from native.cache import NoNative, building, is_ours, library_folder, replace_whole
from native.compiler import Compiler, find_compiler
from native.recipe import Recipe

VARIABLE = "PDSERVE_NATIVE"
BUILD_TIMEOUT_S = 120.0
T = TypeVar("T")

_log = logging.getLogger("pdserve.native")


def load_library(recipe: Recipe[T], environ: Mapping[str, str], *, timeout_s: float = BUILD_TIMEOUT_S) -> T | None:
    """Return the opened library, built if need be; None, with one warning, where that fails.

    None without a word under PDSERVE_NATIVE=off. Raises ValueError for other values than on and off.
    """
    wanted = environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={wanted}: choose on or off")
    if wanted == "off":
        return None
    try:
        return build_library(recipe, environ, timeout_s=timeout_s)
    except NoNative as error:
        reason = json.dumps(" ".join(str(error).split()), ensure_ascii=True)
        _log.warning("native_unavailable library=%s reason=%s", recipe.name, reason)
        return None


def build_library(recipe: Recipe[T], environ: Mapping[str, str], *, timeout_s: float = BUILD_TIMEOUT_S) -> T:
    """Return the opened library, from the cache if it is there. Raises NoNative."""
    folder, compiler = library_folder(environ), find_compiler(environ)
    path = _path(recipe, folder, compiler)
    try:
        if path is not None and is_ours(folder) and is_ours(path):
            return recipe.open(path)
    except NoNative:
        if compiler is None or not is_ours(folder):
            raise  # else the file alone is bad: it is built anew
    if compiler is None or path is None:
        raise NoNative("there is no C compiler (CC, cc, gcc, clang)")
    try:
        return _build(recipe, path, compiler, environ, time.monotonic() + timeout_s)
    except OSError as error:
        raise NoNative(f"{folder} cannot be written: {error}") from error


def _build(recipe: Recipe[T], path: Path, compiler: Compiler, environ: Mapping[str, str], deadline: float) -> T:
    with building(path.parent, recipe.name, deadline):
        try:
            if is_ours(path):  # another process was faster
                return recipe.open(path)
        except NoNative:
            path.unlink()
        for left_over in path.parent.glob(f"draft-{recipe.name}-*"):  # of builds that were killed: the lock is ours
            left_over.unlink()
        draft = path.parent / f"draft-{recipe.name}-{os.getpid()}.so"
        try:
            compiler.build(recipe, draft, environ=environ, deadline=deadline)
            draft.chmod(0o700)
            recipe.open(draft)
            replace_whole(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return recipe.open(path)


def _path(recipe: Recipe[T], folder: Path, compiler: Compiler | None) -> Path | None:
    stem = f"{recipe.name}-{recipe.key()}"
    if compiler is not None:
        return folder / f"{stem}-{compiler.stamp}.so"
    return next(iter(sorted(folder.glob(f"{stem}-*.so"))), None)
