"""`python -m native.build`: build the native functions now, so that the first start does not wait for the compiler."""

import sys

from native.cache import NoNative
from native.library import build


def main() -> int:
    """Build and tell what became of it. Returns 1 where there are no native functions, which is no disaster."""
    try:
        library = build()
    except NoNative as error:
        sys.stderr.write(f"native: not built, Python does the work: {error}\n")
        return 1
    sys.stdout.write(f"native: ready, kernel {library.kernel} of {list(library.kernels)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
