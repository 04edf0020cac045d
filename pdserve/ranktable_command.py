"""Run the command `ranktable` with `--config cluster.yaml`: the tools themselves import no pdserve and no YAML."""
# PYTHON_ARGCOMPLETE_OK

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdserve.tab_completion import VARIABLE, complete

TYPE_CHECKING = False  # slow imports happen where Ctrl-C is handled
if TYPE_CHECKING:
    import argparse

    from pdserve.flags.config_file import Entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, 2 for bad input, or 130 after Ctrl-C."""
    return run_tool(argv, "ranktable_tools.cli", _run_with_file)


def run_tool(argv: Sequence[str] | None, module: str, run_with_file: Callable[[Sequence[str]], int]) -> int:
    """Run one command line of a module's tool, by `run_with_file` if it has --config; return 130 after Ctrl-C."""
    try:
        import importlib

        tool = importlib.import_module(module)
        if VARIABLE in os.environ:
            complete(tool.command_parser())
        typed = list(sys.argv[1:] if argv is None else argv)
        has_file = any(word.partition("=")[0] == "--config" for word in typed)
        status: int = run_with_file(typed) if has_file else tool.main(typed)
    except KeyboardInterrupt:
        return 130
    return status


def _run_with_file(typed: Sequence[str]) -> int:
    from ranktable_tools import cli
    from wire.errors import ConfigError

    try:
        plain, variables = with_file(typed, os.environ)
    except ConfigError as error:
        print(f"ranktable: {error}", file=sys.stderr)
        return 2
    os.environ.update(variables)
    return cli.main(plain)


def with_file(typed: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line with the flags of its --config, and the guide's variables that the file sets.

    The command line and the environment win over the file. Raises ConfigError.
    """
    from pdserve.flags.config_file import read
    from pdserve.flags.from_file import arguments_of
    from pdserve.flags.parser import take_config
    from ranktable_tools import cli

    path, rest = take_config(typed)
    assert path is not None, "the caller checked for the flag"
    parsers = cli.command_parsers()
    command = next((word for word in rest if word in parsers), None)
    if command is None:
        return list(rest), {}
    known = parsers[command]._option_string_actions
    entries = read(path)
    typed_fields = named(rest, known)

    def is_open(entry: "Entry") -> bool:
        action = known.get(entry.flag)
        return action is None or action.dest not in typed_fields

    from_file = arguments_of([entry for entry in entries if is_open(entry)], known, {}, serves=False, joins=False).argv
    end = rest.index("--") if "--" in rest else len(rest)
    variables = {name: value for name, value in _variables(entries) if not environ.get(name)}
    return [*rest[:end], *from_file, *rest[end:]], variables


def named(typed: Sequence[str], known: "Mapping[str, argparse.Action]") -> frozenset[str]:
    """Return the fields that a command line names."""
    flags = (word.partition("=")[0] for word in typed)
    return frozenset(known[flag].dest for flag in flags if flag in known)


def _variables(entries: "Sequence[Entry]") -> Iterator[tuple[str, str]]:
    """Yield the guide's variables that the file has as keys: `doctor` reads them from the environment."""
    from dataclasses import fields

    from scheduler.config import SchedulerOptions

    variable_by_flag = {
        "--" + field.name.replace("_", "-"): field.metadata["env"]
        for field in fields(SchedulerOptions)
        if field.metadata["env"]
    }
    for entry in entries:
        if entry.flag in variable_by_flag:
            yield variable_by_flag[entry.flag], ",".join(value.text for value in entry.values)


if __name__ == "__main__":
    sys.exit(main())
