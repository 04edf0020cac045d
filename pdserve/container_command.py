"""Run deploy/docker_run.sh or build_image.sh with `--config cluster.yaml`: the tools themselves cannot read YAML."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ranktable_tools.arguments import OneLineParser
from ranktable_tools.containers import build_image, docker_run
from ranktable_tools.launch_plan import GLOBAL_VARIABLE, LOCAL_VARIABLE

if TYPE_CHECKING:
    from pdserve.flags.config_file import Entry


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool; `variables` maps a field to the environment variable that sets it too."""

    name: str
    main: Callable[[Sequence[str]], int]
    parser: Callable[[], OneLineParser]
    variables: Mapping[str, str]


_TOOLS: Final[Mapping[str, _Tool]] = {
    "docker_run": _Tool(
        "docker_run.sh", docker_run.main, docker_run.command_parser,
        {"global_table": GLOBAL_VARIABLE, "local_table": LOCAL_VARIABLE},
    ),
    "build_image": _Tool("build_image.sh", build_image.main, build_image.command_parser, {}),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `docker_run ...` or `build_image ...`; return the exit status, 2 for bad input."""
    name, *typed = sys.argv[1:] if argv is None else argv
    tool = _TOOLS[name]
    before = typed[: typed.index("--")] if "--" in typed else typed
    if not any(word.partition("=")[0] == "--config" for word in before):
        return tool.main(typed)
    try:
        from wire.errors import ConfigError

        try:
            plain = with_file(name, typed, os.environ)
        except ConfigError as error:
            return _refuse(tool, str(error))
    except ModuleNotFoundError as error:
        missing = f"--config needs the Python package {error.name}, which is not installed"
        return _refuse(tool, f"{missing}: run scripts/install, or pass the flags")
    return tool.main(plain)


def with_file(name: str, typed: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command line of a tool with the flags of its --config; the command line and the environment win.

    The scheduler's key `global-rank-table` also sets the global table here. Raises ConfigError.
    """
    from pdserve.flags.config_file import read
    from pdserve.flags.from_file import arguments_of
    from pdserve.flags.parser import take_config
    from pdserve.ranktable_command import named

    path, rest = take_config(typed)
    assert path is not None, "the caller checked for the flag"
    tool = _TOOLS[name]
    known = tool.parser()._option_string_actions
    end = rest.index("--") if "--" in rest else len(rest)
    closed = named(rest[:end], known) | {field for field, variable in tool.variables.items() if environ.get(variable)}
    entries = [
        changed for entry in _with_scheduler_key(read(path), name) if (changed := _of_image(entry, name)) is not None
    ]
    chosen = [entry for entry in entries if entry.flag not in known or known[entry.flag].dest not in closed]
    return [*rest[:end], *arguments_of(chosen, known, {}, serves=False).argv, *rest[end:]]


def _with_scheduler_key(entries: "Sequence[Entry]", name: str) -> "Sequence[Entry]":
    """Return the entries with the scheduler's key renamed to docker_run.sh's own, if the latter is missing."""
    if name != "docker_run" or any(entry.flag == "--global-table" for entry in entries):
        return entries
    return [replace(one, key="global-table") if one.flag == "--global-rank-table" else one for one in entries]


def _of_image(entry: "Entry", name: str) -> "Entry | None":
    """Return an entry `device` translated to the image kind; None where build_image.sh detects it."""
    from devices.table import AUTO, KINDS

    device = entry.values[0].text
    if name != "build_image" or entry.flag != "--device" or device not in (AUTO, *KINDS):
        return entry
    image = None if device == AUTO else KINDS[device].traits.image or device
    return None if image is None else replace(entry, values=(replace(entry.values[0], text=image),))


def _refuse(tool: _Tool, message: str) -> int:
    print(f"{tool.name}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
