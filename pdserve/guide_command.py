"""Run the guide's `pd_ranktable_tools` with `--config cluster.yaml`: the tool itself imports no pdserve and no YAML."""
# PYTHON_ARGCOMPLETE_OK

import sys
from collections.abc import Sequence
from itertools import zip_longest

from pdserve.ranktable_command import named, run_tool

TYPE_CHECKING = False  # slow imports happen where Ctrl-C is handled
if TYPE_CHECKING:
    from pdserve.flags.config_file import Entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, 2 for bad input, or 130 after Ctrl-C."""
    return run_tool(argv, "ranktable_tools.guide", _run_with_file)


def _run_with_file(typed: Sequence[str]) -> int:
    from ranktable_tools import guide
    from wire.errors import ConfigError

    try:
        plain = with_file(typed)
    except ModuleNotFoundError as error:
        name = f"--config needs the Python package {error.name}, which is not installed"
        return guide.refuse(f"{name}: install pdserve (scripts/install), or pass the flags")
    except ConfigError as error:
        return guide.refuse(str(error))
    return guide.main(plain)


def with_file(typed: Sequence[str]) -> list[str]:
    """Return the command line with the flags of its --config; the command line wins.

    Keys of other modes are ignored, so that one file serves all. Raises ConfigError.
    """
    from pdserve.flags.config_file import read
    from pdserve.flags.from_file import arguments_of
    from pdserve.flags.parser import take_config
    from ranktable_tools import guide

    path, rest = take_config(typed)
    assert path is not None, "the caller checked for the flag"
    known = guide.command_parser()._option_string_actions
    entries = read(path)
    closed = named(rest, known) | guide.fields_of_other_modes(_find_mode(rest, entries))
    chosen = [entry for entry in entries if entry.flag not in known or known[entry.flag].dest not in closed]
    return [*rest, *arguments_of(chosen, known, {}, serves=False, joins=False).argv]


def _find_mode(typed: Sequence[str], entries: "Sequence[Entry]") -> str:
    """Return the mode to run: from the command line, else the file, else the tool's default."""
    spelled = [entry.values[0].text for entry in entries if entry.flag == "--mode"]
    for word, after in zip_longest(typed, typed[1:], fillvalue=""):
        flag, is_inline, value = word.partition("=")
        if flag == "--mode":
            spelled = [value if is_inline else after]
    return spelled[0] if spelled else "gen"


if __name__ == "__main__":
    sys.exit(main())
