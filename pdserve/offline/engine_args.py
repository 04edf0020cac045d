"""The keywords of LLM as an object and as a script's flags: vLLM's EngineArgs and FlexibleArgumentParser.

EngineArgs.add_cli_args(parser) -> parser.parse_args() -> LLM(**vars(args)), or LLM.from_engine_args(EngineArgs...)
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Self

from flags.options import EngineOptions, add_flags
from pdserve.flags.adapter_and_trace_rows import ADAPTER_AND_TRACE_ROWS
from pdserve.flags.engine_args_rows import ENGINE_ARGS_ROWS
from pdserve.flags.engine_rows import ENGINE_ROWS
from pdserve.flags.parser import CommandParser
from pdserve.flags.recent_rows import RECENT_ROWS
from pdserve.flags.row import Arity, VllmFlag
from pdserve.flags.table import dashed
from pdserve.offline.keywords import DECIDED
from scheduler.config import SchedulerOptions
from wire.errors import ConfigError

_OWN: dict[str, Any] = {
    "cluster": str,
    "prefill": int,
    "decode": int,
    "max_in_flight": int,
    "tokenizer": str,
    "seed": int,
}
_DEFAULTS = {"model": "", "seed": 0}
_INTERNAL = ("_api_process_count", "_api_process_rank")
_HIDDEN = DECIDED | {"api_key"}  # a key belongs in the environment: any user of this host can see a command line


def _names() -> list[str]:
    own = [field.name for options in (EngineOptions, SchedulerOptions) for field in dataclasses.fields(options)]
    vllms = [_field(row) for row in _rows()]
    return [name for name in dict.fromkeys((*own, *_OWN, *vllms)) if name not in _HIDDEN]


def _rows() -> list[VllmFlag]:
    """Return vLLM's engine flags; those with a dot set part of another flag's value."""
    return [
        row
        for row in (*ENGINE_ROWS, *ADAPTER_AND_TRACE_ROWS, *RECENT_ROWS, *ENGINE_ARGS_ROWS)
        if _field(row).isidentifier()
    ]


def _field(row: VllmFlag) -> str:
    return row.name[2:].replace("-", "_")


_Fields: Any = dataclasses.make_dataclass(
    "_Fields",
    [(name, Any, dataclasses.field(default=_DEFAULTS.get(name))) for name in (*_names(), *_INTERNAL)],
)


class EngineArgs(_Fields):  # type: ignore[misc]
    """Every keyword of LLM; None means LLM's default. A dataclass: `asdict` returns the keywords."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each keyword, and return the parser."""
        own = parser.add_argument_group("LLM")
        for name, kind in _OWN.items():
            own.add_argument(f"--{name.replace('_', '-')}", type=kind, help="the LLM keyword of this name")
        for options in (EngineOptions, SchedulerOptions):
            add_flags(parser, options, without=_HIDDEN)
        others = parser.add_argument_group("vLLM's")
        for row in _rows():
            if _field(row) not in _HIDDEN and row.name not in parser._option_string_actions:
                others.add_argument(row.name, dest=_field(row), help=row.why.replace("%", "%%"), **_shape(row.arity))
        parser.set_defaults(**(dict.fromkeys(_names()) | _DEFAULTS))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the keywords from parsed flags, without the script's own flags."""
        given = vars(args)
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given})

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments for LLM."""
        given = vars(self).items()
        return {name: value for name, value in given if value is not None or name == "seed"}  # None is a valid seed


class FlexibleArgumentParser(CommandParser):
    """argparse that accepts `_` for `-` in flags, and `--config FILE` with flags as keys; the command line wins."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the flags. Exits the script with status 2 if one is invalid."""
        typed = sys.argv[1:] if args is None else args
        try:
            return super().parse_args([_with_dashes(word) for word in typed], namespace)
        except ConfigError as error:
            self.print_usage(sys.stderr)
            self.exit(2, f"{self.prog}: error: {error}\n")


def _shape(arity: Arity) -> dict[str, Any]:
    if arity is Arity.NOTHING:
        return {"action": argparse.BooleanOptionalAction}
    if arity is Arity.MAYBE:
        return {"nargs": "?", "const": True}
    return {"nargs": "*"} if arity is Arity.MANY else {}


def _with_dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    return dashed(flag) + equals + value if word.startswith("--") else word
