"""`python -m native.build`: build the native functions now, so that the first start has them."""

import os
import sys

from native.builder import build_library
from native.cache import NoNative
from native.engine_library import build_engine
from native.libraries import RECIPES
from native.library import build
from native.termination import unwind_on_sigterm


def main() -> int:
    """Build and tell what became of it. Returns 1 where there are no native functions, which is no disaster."""
    unwind_on_sigterm()
    try:
        library = build()
        sys.stdout.write(f"native: ready, kernel {library.kernel} of {list(library.kernels)}\n")
        engine = build_engine()
        sys.stdout.write(f"native: ready, the engine's kernels with {engine.best_isa} of {', '.join(engine.isas)}\n")
        build_all()
    except NoNative as error:
        sys.stderr.write(f"native: not built, Python does the work: {error}\n")
        return 1
    return 0


def build_all() -> None:
    """Build every library that is not there yet. Raises NoNative."""
    for recipe in RECIPES.values():
        build_library(recipe, os.environ)


if __name__ == "__main__":
    sys.exit(main())
