"""The engine's native library for tests, which are skipped with a reason where it cannot be built."""

import os
import shutil
from pathlib import Path

import pytest

from native.cache import NoNative, library_folder
from native.engine_library import EngineLibrary, Threads, build_engine


def built_engine() -> EngineLibrary:
    """Return the library; skip where it cannot be compiled."""
    try:
        return build_engine()
    except NoNative as error:
        pytest.skip(f"missing tool: no native kernels here: {error}")


def copy_libraries(cache: Path) -> None:
    """Copy the built libraries into another cache folder, so that no process compiles them again."""
    built = library_folder(os.environ)
    if built.is_dir():
        shutil.copytree(built, cache / "native", dirs_exist_ok=True)


def threads_with(isa: str, count: int) -> Threads:
    """Return a team whose kernels are those of `isa`; skip on a CPU without it."""
    library = built_engine()
    if isa not in library.isas:
        pytest.skip(f"this CPU has no {isa}")
    return library.threads(count, isa=isa)
