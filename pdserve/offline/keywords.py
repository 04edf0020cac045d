"""The keywords of LLM(...): the flags of `pdserve serve` and vLLM's, with underscores.

keywords -> command-line arguments -> vLLM's converted as for commands -> options
"""

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flags.options import EngineOptions, Parser, add_flags, from_namespace, is_switch
from pdserve.flags.parser import prepare
from pdserve.flags.row import Arity, FlagVerdict
from pdserve.flags.table import ROWS, find
from scheduler.config import SchedulerConfig, SchedulerOptions
from wire.errors import ConfigError

DECIDED = frozenset((
    "host", "port", "ip", "kv_ip", "http_port", "share_devices", "global_rank_table", "node_ports", "use_openai",
    "connector", "worker_api_key_file", "worker_callback",
    "api_key_file", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "root_path", "config", "responses_store",
    "responses_store_count", "responses_store_bytes", "responses_store_ttl",
    "_api_process_count", "_api_process_rank",
))  # fmt: skip
_OFFLINE: Mapping[str, Any] = {
    "first_token_timeout": 86_400.0, "stall_timeout": 300.0, "max_n": 4096, "max_stop_strings": 4096,
    "max_queued_requests": 100_000, "max_queued_tokens": 10**9, "max_answer_bytes": 2**30, "max_body_bytes": 2**28,
    "enable_prompt_tokens_details": True, "log_level": "WARNING",
}  # fmt: skip
"""Offline there are no other clients to protect the server from, so the limits are large."""


@dataclass(frozen=True, slots=True)
class KeywordOptions:
    """Command-line arguments for a pdserve server, and their options."""

    arguments: tuple[str, ...]
    engine: EngineOptions
    scheduler: SchedulerOptions


def read_keywords(model: str, keywords: Mapping[str, Any]) -> KeywordOptions:
    """Convert the keywords to options; print one line on stderr for those without effect.

    Raises TypeError for an unknown keyword, with the nearest, and ConfigError for a refused one.
    """
    for name, value in keywords.items():
        _check_name(name, value)
    parser = _parser()
    chosen = {name: value for name, value in keywords.items() if value is not None}
    given = {"model": model or None, **_OFFLINE, **chosen}
    arguments = [word for name, value in given.items() for word in _arguments(name, value)]
    try:
        prepared = prepare(arguments, parser, os.environ, serves=True)
        if prepared.notice:
            print(as_keywords(prepared.notice), file=sys.stderr, flush=True)
        namespace = parser.parse_args(prepared.argv)
        return KeywordOptions(
            prepared.argv, from_namespace(EngineOptions, namespace), from_namespace(SchedulerOptions, namespace)
        )
    except ConfigError as error:
        raise ConfigError(as_keywords(str(error))) from error


def as_keywords(arguments: str) -> str:
    """Replace flags in a message by keywords, except flags of a command to run."""
    return re.sub(r"(?<!install )--([a-z][a-z0-9-]*)", _to_keyword, arguments.removeprefix("argument "))


def fill_model(options: KeywordOptions) -> SchedulerConfig:
    """Return the options with a prepared model folder. Raises ConfigError."""
    from pdserve.engine_flags import check_engine_flags
    from pdserve.model import ensure_default
    from pdserve.up_request import fill_model as fill

    parser = _parser()
    namespace = parser.parse_args(options.arguments)
    if not options.engine.model:
        namespace.model = str(ensure_default(os.environ))
        namespace.served_model_name = [*getattr(namespace, "served_model_name", []), Path(namespace.model).name]
    check_engine_flags(options.engine)
    fill(namespace)
    return SchedulerConfig(from_namespace(EngineOptions, namespace), from_namespace(SchedulerOptions, namespace))


def without_effect_on_cluster(keywords: Mapping[str, Any]) -> str | None:
    """Return a notice for keywords that cannot change a running cluster, None if there are none.

    Raises TypeError for an unknown keyword.
    """
    for name, value in keywords.items():
        _check_name(name, value)
    named = ", ".join(name for name, value in keywords.items() if value is not None)
    return f"without effect on a running cluster, which has its own settings: {named}" if named else None


def _parser() -> Parser:
    parser = Parser(prog="LLM", add_help=False)
    add_flags(parser, EngineOptions)
    add_flags(parser, SchedulerOptions)
    return parser


def _check_name(name: str, value: object) -> None:
    if name in DECIDED:
        if value is None:
            return
        raise ConfigError(f"{name} is for servers: leave it out for LLM")
    ours = {field.name for options in (EngineOptions, SchedulerOptions) for field in dataclasses.fields(options)}
    if name in ours or find(_flag(name)) is not None:
        return
    taken = {row.name[2:].replace("-", "_") for row in ROWS if row.verdict is not FlagVerdict.REFUSED}
    near = difflib.get_close_matches(name, sorted((ours | taken) - DECIDED), n=1)
    raise TypeError(f"LLM has no keyword {name!r}" + (f": did you mean {near[0]}?" if near else ""))


def _arguments(name: str, value: Any) -> Sequence[str]:
    """Return a keyword as command-line arguments, none for None."""
    flag, row = _flag(name), find(_flag(name))
    if value is None:
        return ()
    if isinstance(value, bool):
        if row is not None and row.arity is Arity.MAYBE:
            return (f"{flag}={str(value).lower()}",)
        return (flag,) if value else (f"--no-{flag[2:]}",) if _is_switch(name) else ()
    if _is_switch(name) or (row is not None and row.arity is Arity.NOTHING):
        raise ConfigError(f"{name} is {value!r}, but must be True or False")
    if isinstance(value, Mapping):
        return (f"{flag}={json.dumps(value)}",)
    if isinstance(value, list | tuple):
        return (flag, *map(str, value)) if value else ()
    return (f"{flag}={value}",)


def _is_switch(name: str) -> bool:
    fields = (*dataclasses.fields(EngineOptions), *dataclasses.fields(SchedulerOptions))
    return any(field.name == name and is_switch(field) for field in fields)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _to_keyword(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")
