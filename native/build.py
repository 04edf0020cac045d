"""`python -m native.build`: build the native functions now, so that the first start has them."""

import os
import sys
import time

from native.builder import BUILD_TIMEOUT_S, build_library, is_built
from native.cache import NoNative
from native.engine_library import build_engine
from native.libraries import RECIPES
from native.move_library import build
from native.termination import unwind_on_sigterm


def main(limit_s: float = BUILD_TIMEOUT_S) -> int:
    """Build missing libraries, with a line on stderr for each, in at most `limit_s`.

    Returns 1 if the native functions cannot be built; Python then replaces them.
    """
    unwind_on_sigterm()
    try:
        build_all(limit_s)
        library, engine = build(), build_engine()
    except NoNative as error:
        sys.stderr.write(f"native: not built, Python does the work: {error}\n")
        return 1
    sys.stdout.write(f"native: ready, kernel {library.kernel} of {list(library.kernels)}\n")
    sys.stdout.write(f"native: ready, the engine's kernels with {engine.best_isa} of {', '.join(engine.isas)}\n")
    return 0


def build_all(limit_s: float = BUILD_TIMEOUT_S) -> None:
    """Build every missing library, in at most `limit_s` in total. Raises NoNative."""
    deadline = time.monotonic() + limit_s
    for number, recipe in enumerate(RECIPES.values(), 1):
        if not is_built(recipe, os.environ):
            left_s = max(0.0, deadline - time.monotonic())
            which = f"{recipe.name}, {number} of {len(RECIPES)}"
            sys.stderr.write(f"native: building {which}, in at most {left_s:.0f} s\n")
            build_library(recipe, os.environ, timeout_s=left_s)


if __name__ == "__main__":
    sys.exit(main())
