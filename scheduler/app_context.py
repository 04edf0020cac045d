"""What the HTTP surface stands on: everything an endpoint needs, made once by the process's entry point."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.http.drain import Drain
from scheduler.http.keys import Keys
from scheduler.model.generation_defaults import GenerationDefaults
from scheduler.observability.metrics import Metrics
from scheduler.observability.traces import Traces
from scheduler.request import Dispatcher
from scheduler.stream import Observer
from scheduler.tokens import Tokens
from wire.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """Whether a request would be served now; if not, `missing` says what for, in words. `view` is shown as it is."""

    ready: bool
    missing: tuple[str, ...] = ()
    view: Mapping[str, Any] = field(default_factory=dict)


def always_healthy() -> str | None:
    """Return None: a process that answers and has no engine of its own is well."""
    return None


def no_bound(num_tokens: int, num_sequences: int) -> int | None:
    """Return None: only the model's length bounds the output."""
    return None


@dataclass(frozen=True, slots=True)
class AppContext:
    """The scheduler behind its HTTP surface.

    `health` returns why the process cannot work, None if it can; `most_output` how many output tokens the KV pools
    hold behind a prompt for each of its sequences.
    """

    config: SchedulerConfig
    dispatcher: Dispatcher
    tokens: Tokens
    metrics: Metrics
    readiness: Callable[[], ReadyReport]
    health: Callable[[], str | None] = always_healthy
    most_output: Callable[[int, int], int | None] = no_bound
    drain: Drain = field(default_factory=Drain)
    keys: Keys = field(default_factory=Keys)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    traces: Traces | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def observer_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Observer:
        """Return who hears how a request goes, by its HTTP headers: the figures, and its trace where there are any."""
        figures = self.metrics.figures
        return figures if self.traces is None else self.traces.observer(figures, headers)

    def model_named(self, name: str | None) -> str:
        """Return the model that a body's `model` names: the served one where it names none. Raises UnknownModel."""
        names = self.config.engine.served_names()
        if name is None:
            return names[0]
        if name not in names:
            shown = ", ".join(one for one in names if not one.startswith("/"))  # no folder of this host
            raise UnknownModel(f"the model {name[:200]!r} does not exist here; served: {shown or 'see /v1/models'}")
        return name
