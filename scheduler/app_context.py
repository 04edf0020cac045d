"""The HTTP API's dependencies: everything an endpoint needs, created once at startup."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.dispatch import Dispatch
from scheduler.http.drain import Drain
from scheduler.http.keys import Keys
from scheduler.images.image_loader import ImageLoader
from scheduler.model.generation_defaults import GUIDE_DEFAULTS
from scheduler.observability.metrics import Metrics
from scheduler.observability.traces import Traces
from scheduler.request import Dispatcher
from scheduler.request_claims import RequestClaims
from scheduler.request_class import UNCLASSED, RequestClass, class_named
from scheduler.responses_store.background_runs import BackgroundRuns
from scheduler.responses_store.response_store import ResponseStore
from scheduler.text_output import Observer
from scheduler.tokens import Tokens
from wire.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """Whether a request would be served now; if not, `missing` lists what is missing. `view` is shown unchanged."""

    ready: bool
    missing: tuple[str, ...] = ()
    view: Mapping[str, Any] = field(default_factory=dict)


def always_healthy() -> str | None:
    """Return None: a process without its own engine is healthy while it answers."""
    return None


def no_bound(num_tokens: int, num_sequences: int) -> int | None:
    """Return None: only the model's length limits the output."""
    return None


class SaltOfAll:
    """A salt of every request's KV: a new one makes whatever is cached unreachable, on all instances at once.

    Running requests keep their blocks; unreachable ones are evicted as needed.
    """

    def __init__(self) -> None:
        self.value = ""

    def renew(self) -> None:
        """Make later requests ignore everything that is cached now."""
        self.value = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class AppContext:
    """The scheduler's state for the HTTP API.

    `health` returns why the process cannot work, None if it can; `max_output` returns how many output tokens per
    sequence fit into the KV pools after a prompt; `responses` stores those of /v1/responses, None if nothing does;
    `images` loads those of chats, None for a model that takes text only; `streams` continues kept ones;
    `claims` is for requests with an Idempotency-Key.
    """

    config: SchedulerConfig
    dispatcher: Dispatcher
    tokens: Tokens
    metrics: Metrics
    readiness: Callable[[], ReadyReport]
    health: Callable[[], str | None] = always_healthy
    max_output: Callable[[int, int], int | None] = no_bound
    drain: Drain = field(default_factory=Drain)
    keys: Keys = field(default_factory=Keys)
    defaults: Mapping[str, Any] = field(default_factory=lambda: GUIDE_DEFAULTS)
    traces: Traces | None = None
    salt_of_all: SaltOfAll = field(default_factory=SaltOfAll)
    images: ImageLoader | None = None
    streams: Dispatch | None = None
    claims: RequestClaims | None = None
    responses: ResponseStore | None = None
    background: BackgroundRuns = field(default_factory=BackgroundRuns)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def call_parser(self) -> str | None:
        """Return the format in which the model writes tool calls: the operator's choice, or the one in its template."""
        return self.config.options.tool_call_parser or self.tokens.files.call_format

    def class_of(self, tenant: str, name: str | None) -> RequestClass:
        """Return the class of a request: the one it names, or its key's default. Raises InvalidRequest.

        Without keys any client may use every class.
        """
        classes = self.config.options.classes()
        if not len(self.keys):
            return class_named(name, classes, tuple(classes)) if name else UNCLASSED
        return class_named(name, classes, self.keys.classes_of(tenant))

    def observer_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Observer:
        """Return the observer of a request with these HTTP headers: the counters, or its trace if tracing is on."""
        counters = self.metrics.counters
        return counters if self.traces is None else self.traces.observer(counters, headers)

    def model_named(self, name: str | None) -> str:
        """Return the model that a body's `model` names, the served one if it is None. Raises UnknownModel."""
        names = self.config.engine.served_names()
        if name is None:
            return names[0]
        if name not in names:
            shown = ", ".join(one for one in names if not one.startswith("/"))  # hide folders of this host
            raise UnknownModel(f"the model {name[:200]!r} does not exist here; served: {shown or 'see /v1/models'}")
        return name
