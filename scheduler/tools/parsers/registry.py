"""The formats of tool calls by their names, which are vLLM's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler.tools.deltas import ToolCallParser
from scheduler.tools.parsers.hermes import MARKERS as HERMES_MARKERS
from scheduler.tools.parsers.hermes import HermesParser


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format: a parser for each choice, and the texts that must reach it even if they are special tokens."""

    make_parser: Callable[[], ToolCallParser]
    markers: tuple[str, ...]


CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({"hermes": CallFormat(HermesParser, HERMES_MARKERS)})
