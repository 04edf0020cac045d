"""`ranktable watch`: print each change of a table as it happens, until Ctrl-C."""

import argparse
import contextlib
import time
from collections.abc import Callable

from ranktable_tools.any_file import read_table
from ranktable_tools.arguments import OneLineParser, add_command, add_dialect, add_read_options, read_options
from ranktable_tools.errors import RanktableError
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.watch import Seen, Watch, seen
from ranktable_tools.watched_table import WatchedTable

_DESCRIPTION = (
    "Print each change of a table in a sentence, until Ctrl-C. A broken table is reported once, and the previous one "
    "is kept; a table that is not completed is read again until it is. A running scheduler follows its table by the "
    "same rules."
)
_MAX_S = 3600.0


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "watch", _DESCRIPTION)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between reads (default: 1)")
    parser.add_argument("--for", dest="for_s", type=float, metavar="S", help="exit after this many seconds")
    add_dialect(parser)
    add_read_options(parser)
    parser.set_defaults(command=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    interval_s = arguments.interval
    if not 0 < interval_s <= _MAX_S:
        raise RanktableError(f"--interval is {interval_s:g}, but must be more than 0 and at most {_MAX_S:g} seconds")
    if arguments.for_s is not None and not arguments.for_s > 0:
        raise RanktableError(f"--for is {arguments.for_s:g}, but must be more than 0 seconds")
    options = read_options(arguments)

    def read(path: str) -> Seen:
        opened = read_table(path, arguments.dialect, options, RuleOptions(share_devices=True))
        return seen(opened.reading.table, is_ours=opened.dialect.name == "modelarts")

    _refuse_what_is_no_table(read, arguments.file)
    watch = Watch(WatchedTable(arguments.file, read), _print_line)
    ends_at = None if arguments.for_s is None else time.monotonic() + arguments.for_s
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            watch.poll()
            if ends_at is not None and time.monotonic() >= ends_at:
                break
            time.sleep(interval_s)
    return 0


def _refuse_what_is_no_table(read: Callable[[str], Seen], path: str) -> None:
    """Raise RanktableError for a file that is missing or invalid at the start: its name may be misspelt."""
    try:
        read(path)
    except RanktableError as error:
        if error.code != "not-completed":
            raise


def _print_line(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
