"""One line of progress on stderr: overwritten on a terminal and cleared at the end, else printed each time."""

import sys
from typing import Self

from tqdm import tqdm


class StatusLine:
    """Owns the terminal's line. Use as a context manager."""

    def __init__(self) -> None:
        self._line = tqdm(bar_format="{desc}", file=sys.stderr, disable=None, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def show(self, line: str) -> None:
        """Show this line in place of the last."""
        if self._line.disable:  # not a terminal
            print(line, file=sys.stderr, flush=True)
        else:
            self._line.set_description_str(line)
