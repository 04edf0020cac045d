"""Tab completion by argcomplete: the shell runs the command again at each TAB, and only the needed parser is built.

eval "$(register-python-argcomplete pdserve)" sets the variables that enable it.
"""

import os
from collections.abc import Callable, Mapping, Sequence

TYPE_CHECKING = False  # every command imports this module before it handles Ctrl-C: argparse and typing take 8 ms
if TYPE_CHECKING:
    import argparse
    from typing import NoReturn

VARIABLE = "_ARGCOMPLETE"


def complete(parser: "argparse.ArgumentParser") -> "NoReturn":
    """Write the possible completions and exit, even if argcomplete is missing: the command itself must not run."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        os._exit(1)
    argcomplete.autocomplete(parser, always_complete_options="long")
    os._exit(1)


def complete_command(
    commands: Mapping[str, str], benchmarks: Mapping[str, str], run: Callable[[str, Sequence[str]], object]
) -> "NoReturn":
    """Complete the name of a command or benchmark; once a command is named, `run` it so that its parser completes."""
    import argparse

    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))]
    words = line.split()[1:]
    if line[-1:].strip():
        words = words[:-1]  # the last word is still incomplete
    before, names = (1, benchmarks) if words[:1] == ["bench"] else (0, commands)
    if len(words) > before and words[before] in names:
        os.environ[VARIABLE] = str(before + 2)  # the command's own arguments start after that word
        run(words[0], words[1 : before + 1])
    os.environ[VARIABLE] = str(before + 1)
    parser = argparse.ArgumentParser()
    named = parser.add_subparsers()
    for name, what in names.items():
        named.add_parser(name, help=what)
    complete(parser)
