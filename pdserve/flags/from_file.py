"""Convert the entries of `--config` into command-line arguments of one command."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flags.options import EngineOptions
from pdserve.batch_options import BatchOptions
from pdserve.flags.config_file import Entry
from pdserve.flags.row import Arity
from pdserve.flags.settle import settle
from pdserve.flags.table import find, nearest
from pdserve.up_options import UpOptions
from scheduler.config import SchedulerOptions
from wire.errors import ConfigError

_NEVER = ("config", "help")
_WHERE = ("--url", "--run-dir")
_VARIABLES = {"run_dir": "PDSERVE_RUN_DIR"}


@dataclass(frozen=True, slots=True)
class FileArguments:
    """The arguments from a file for one command, and the fields that they set."""

    argv: tuple[str, ...]
    fields: frozenset[str]


def arguments_of(
    entries: Sequence[Entry], known: Mapping[str, argparse.Action], environ: Mapping[str, str], *, serves: bool,
    joins: bool = True,
) -> FileArguments:  # fmt: skip
    """Return the entries as arguments of the command whose flags are `known`.

    Flags of other commands are skipped, so that one file serves all, and environment variables win over the file. The
    values of a list are joined by commas into one argument. With `joins` False they stay separate arguments: the caller
    then puts no positional argument after them, as the flag would consume it. Raises ConfigError, with the place, for
    a key that no command has and for a bad value.
    """
    argv: list[str] = []
    fields: set[str] = set()
    foreign: list[str] = []
    elsewhere = cluster_flags()
    for entry in entries:
        action = known.get(entry.flag)
        if action is not None and not _is_not_key(entry, action):
            if not _is_overridden(action.dest, environ):
                argv += _checked(entry, action, joins)
                fields.add(action.dest)
        elif find(entry.flag) is not None and entry.flag not in elsewhere:
            if serves:
                foreign += _vllm_arguments(entry, known)
        elif entry.flag not in elsewhere:
            raise ConfigError(f"{entry.place}: unknown key {entry.key!r}{_advice(entry, (*known, *elsewhere))}")
    return FileArguments((*argv, *foreign), frozenset(fields))


def cluster_flags() -> frozenset[str]:
    """Return the flags of all cluster commands: engine, scheduler, `up`, run-batch, target, and the ranktable tools."""
    from ranktable_tools import guide
    from ranktable_tools.cli import command_parsers
    from ranktable_tools.containers import build_image, docker_run

    declared = (
        "--" + field.name.replace("_", "-")
        for options in (EngineOptions, SchedulerOptions, UpOptions, BatchOptions)
        for field in dataclasses.fields(options)
    )
    parsers = (*command_parsers().values(), *(tool.command_parser() for tool in (guide, docker_run, build_image)))
    tools = (flag for parser in parsers for flag in parser._option_string_actions)
    return frozenset((*declared, *_WHERE, *(flag for flag in tools if _may_be_key(flag))))


def _may_be_key(flag: str) -> bool:
    return flag.startswith("--") and flag[2:] not in _NEVER and not flag.startswith("--no-")


def _is_not_key(entry: Entry, action: argparse.Action) -> bool:
    """Return whether a flag is not allowed in a file: --help, --config, and `--no-X`, which is `X: false` there."""
    return action.dest in _NEVER or (action.nargs == 0 and entry.flag.startswith("--no-"))


def _is_overridden(dest: str, environ: Mapping[str, str]) -> bool:
    declared = {
        field.name: field.metadata["env"]
        for field in (*dataclasses.fields(EngineOptions), *dataclasses.fields(SchedulerOptions))
        if field.metadata.get("env")
    }
    return bool(environ.get((declared | _VARIABLES).get(dest, "")))


def _checked(entry: Entry, action: argparse.Action, joins: bool) -> Iterator[str]:
    """Yield the arguments of one of the command's own flags. Raises ConfigError for a bad value."""
    if action.nargs == 0 or (action.nargs == "?" and not entry.is_list and entry.values[0].boolean is not None):
        yield from _switch_arguments(entry, action)
        return
    repeats = isinstance(action, argparse._AppendAction) and action.nargs is None
    if entry.is_list and action.nargs not in ("+", "*") and not repeats:
        raise ConfigError(f"{entry.place}: {entry.key} takes one value, not a list")
    row = find(entry.flag)
    texts = [row.convert(value.text) if row is not None and row.convert else value.text for value in entry.values]
    for text in texts:
        _check_value(entry, action, text)
    if repeats:
        yield from (f"{entry.flag}={text}" for text in texts)
        return
    if not joins:
        yield from (entry.flag, *texts)
        return
    # One argument for all values: else the flag would also consume the arguments typed after it.
    yield f"{entry.flag}={','.join(texts)}"


def _switch_arguments(entry: Entry, action: argparse.Action) -> Iterator[str]:
    is_on = None if entry.is_list else entry.values[0].boolean
    if is_on is None:
        raise ConfigError(f"{entry.place}: {entry.key} must be true or false, not {entry.values[0].text[:80]!r}")
    opposite = "--no-" + entry.flag[2:]
    if is_on:
        yield entry.flag
    elif opposite in action.option_strings:
        yield opposite


def _check_value(entry: Entry, action: argparse.Action, text: str) -> None:
    parse = action.type if callable(action.type) else str
    try:
        value = parse(text)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        problem = str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{text[:80]!r} is not a valid value"
        raise ConfigError(f"{entry.place}: {entry.key}: {problem}") from error
    if action.choices is not None and value not in action.choices:
        allowed = ", ".join(map(str, action.choices))
        raise ConfigError(f"{entry.place}: {entry.key}: {text[:80]!r} is not one of {allowed}")


def _vllm_arguments(entry: Entry, known: Mapping[str, argparse.Action]) -> tuple[str, ...]:
    """Return the arguments of a vLLM flag. Raises ConfigError, with the place, for a refused one."""
    row = find(entry.flag)
    assert row is not None, "the caller found it"
    if row.arity is Arity.NOTHING:
        if entry.values[0].boolean is None:
            raise ConfigError(f"{entry.place}: {entry.key} must be true or false, not {entry.values[0].text[:80]!r}")
        typed: tuple[str, ...] = (entry.flag,) if entry.values[0].boolean else ()
    else:
        typed = (f"{entry.flag}={','.join(value.text for value in entry.values)}",)
    try:
        settle(typed, known)
    except ConfigError as error:
        raise ConfigError(f"{entry.place}: {error}") from error
    return typed


def _advice(entry: Entry, known: Sequence[str]) -> str:
    """Return what to write instead of an unknown key; flags that are not keys are never proposed."""
    positive = "--" + entry.flag.removeprefix("--no-")
    if entry.flag[2:] in _NEVER:
        return ": it is allowed only on the command line"
    if entry.flag in known and positive in known:
        return f": write `{positive[2:]}: false`"
    return nearest(entry.flag, [flag for flag in known if _may_be_key(flag)]).replace("--", "")
