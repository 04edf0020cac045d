"""`pdserve logs`: show or follow the logs of the cluster's processes."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pdserve.flags.parser import CommandParser
from pdserve.run_folder import RunFolder, default_run_dir
from wire.errors import ConfigError

_POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run the command; with -f it follows until Ctrl-C."""
    parser = CommandParser(prog="pdserve logs", description="Show the logs of the cluster's processes.")
    parser.add_argument("name", nargs="?", help="one process, such as prefill-0 (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    parser.add_argument("-n", "--lines", type=int, default=50, help="last lines to show of each log (default: 50)")
    parser.add_argument("--run-dir", default=str(default_run_dir(os.environ)), help="the run folder given to `up`")
    arguments = parser.parse_args(argv)
    paths = find(arguments.run_dir, arguments.name)
    _warn_if_stopped(Path(arguments.run_dir).absolute())
    tails = [Tail(path, len(paths) > 1) for path in paths]
    for tail in tails:
        tail.show_last(max(0, arguments.lines))
    while arguments.follow:
        for tail in tails:
            tail.show_new()
        sys.stdout.flush()
        time.sleep(_POLL_S)
    return 0


def _warn_if_stopped(run_dir: Path) -> None:
    try:
        state = RunFolder(run_dir).read()
    except ConfigError as error:
        print(f"pdserve logs: {error}", file=sys.stderr)
        return
    if state is None or not state.is_up:
        notice = f"no cluster of `pdserve up` runs in {run_dir} now: these are the logs of the last one"
        print(notice, file=sys.stderr, flush=True)


def find(run_dir: str, name: str | None) -> list[Path]:
    """Return the logs of a run folder, or the one called `name`. Raises ConfigError and lists the existing ones."""
    paths = sorted(RunFolder(Path(run_dir).absolute()).log("*").parent.glob("*.log"))
    if not paths:
        raise ConfigError(f"there are no logs in {run_dir}: no cluster was started there")
    if name is None:
        return paths
    chosen = [path for path in paths if path.stem == name]
    if not chosen:
        raise ConfigError(f"no log is called {name!r}: the logs are {', '.join(path.stem for path in paths)}")
    return chosen


class Tail:
    """One log and the offset up to which it was shown."""

    def __init__(self, path: Path, with_name: bool) -> None:
        self._path = path
        self._prefix = f"{path.stem:<10} | " if with_name else ""
        self._offset, self._file = 0, -1  # the inode

    def show_last(self, lines: int) -> None:
        """Print the last lines."""
        self._print(deque(self._read(), maxlen=lines))

    def show_new(self) -> None:
        """Print the lines added since the last call; a replaced or truncated log is shown from its start."""
        self._print(self._read())

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            print(self._prefix + line)

    def _read(self) -> Sequence[str]:
        """Return the complete lines after the offset, and advance it."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._file, self._offset = found.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return ()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()
