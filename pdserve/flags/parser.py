"""The parser of pdserve's commands: each accepts `--config FILE`; those that serve also accept vLLM's flags."""

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flags.options import Parser
from pdserve.flags.settle import notice, settle
from pdserve.flags.table import dashed, find
from pdserve.tab_completion import VARIABLE, complete
from wire.errors import ConfigError

CONFIG_HELP = "YAML file with flags as keys; a flag wins over the environment, which wins over the file"


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A command line of pdserve's flags only, those of the file first; `from_file`: fields set by the file alone."""

    argv: tuple[str, ...]
    from_file: frozenset[str]
    notice: str | None


class CommandParser(Parser):
    """Parses a command's own flags, `--config`, and, if it `serves`, vLLM's. Owns the fields set by the file alone."""

    def __init__(self, *, serves: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._serves = serves
        self.from_file: Collection[str] = ()
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line, which wins over the file; list flags without effect in one notice on stderr."""
        if VARIABLE in os.environ:
            complete(self)
        typed = sys.argv[1:] if args is None else args
        prepared = prepare(typed, self, os.environ, serves=self._serves)
        if prepared.notice:
            print(prepared.notice, file=sys.stderr, flush=True)
        self.from_file = prepared.from_file
        return super().parse_args(prepared.argv, namespace)


def prepare(
    typed: Sequence[str], parser: argparse.ArgumentParser, environ: Mapping[str, str], *, serves: bool
) -> ParsedLine:
    """Return the arguments for `parser`: the file's, then those typed, vLLM's converted. Raises ConfigError."""
    known = parser._option_string_actions
    path, rest = take_config(_without_repeated_model(typed) if serves else typed)
    of_file, fields = ((), frozenset()) if path is None else _of_file(path, known, environ, serves)
    merged = (*of_file, *rest)
    alone = fields - _fields(rest, known)
    if not serves:
        return ParsedLine(merged, alone, None)
    settled = settle(merged, known)
    return ParsedLine(settled.argv, alone, notice(settled.without_effect) if settled.without_effect else None)


def _of_file(
    path: str, known: Mapping[str, argparse.Action], environ: Mapping[str, str], serves: bool
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the file's arguments and fields; YAML and the tables' parsers are imported only for a file."""
    from pdserve.flags.config_file import read
    from pdserve.flags.from_file import arguments_of

    file = arguments_of(read(path), known, environ, serves=serves)
    return file.argv, file.fields


def _without_repeated_model(typed: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with `--model --model X`, which appears in vLLM's documentation, as `--model X`."""
    return tuple(word for at, word in enumerate(typed) if not word == "--model" in typed[at + 1 : at + 2])


def take_config(typed: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the path after --config, or None, and the other arguments. Raises ConfigError."""
    paths: list[str] = []
    rest: list[str] = []
    waiting = iter(typed)
    for word in waiting:
        if word == "--":
            rest += (word, *waiting)
        elif word == "--config":
            paths.append(next(waiting, ""))
        elif word.startswith("--config="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    if any(not path for path in paths):
        raise ConfigError("--config has no value: pass a YAML file")
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: {', '.join(paths)}")
    return (paths[0] if paths else None), tuple(rest)


def _fields(argv: Sequence[str], known: Mapping[str, argparse.Action]) -> frozenset[str]:
    """Return the fields that a command line sets, also under vLLM's names."""
    names = [dashed(word.partition("=")[0]) for word in argv]
    rows = [find(name) for name in names]
    ours = {row.our_name or row.name for row in rows if row is not None}
    return frozenset(known[name].dest for name in (*names, *ours) if name in known)
