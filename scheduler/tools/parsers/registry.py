"""The formats of tool calls by their names, which are vLLM's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler.tools.call_reader import CallReader, StepParser, Steps
from scheduler.tools.parsers import hermes


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format: its steps, and the texts that must reach them even if they are special tokens."""

    steps: Callable[[CallReader], Steps[None]]
    markers: tuple[str, ...]

    def make_parser(self) -> StepParser:
        """Return a parser of one choice."""
        return StepParser(self.steps)


CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({"hermes": CallFormat(hermes.hermes, hermes.MARKERS)})
