"""One route of the HTTP API: its endpoint, its body and its entry in the OpenAPI document."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from scheduler.api.api_format import OPENAI_FORMAT, ApiFormat
from scheduler.api.body import Body
from scheduler.app_context import AppContext
from scheduler.config import SchedulerOptions
from scheduler.model.kind import ModelKind
from wire.errors import InvalidRequest

Endpoint = Callable[[AppContext, Request], Awaitable[ASGIApp]]

ANY_MODEL = frozenset(ModelKind)
TEXT = frozenset({ModelKind.TEXT})
VECTORS = frozenset({ModelKind.TEXT, ModelKind.VECTORS})
SCORES = VECTORS | {ModelKind.SCORES}
CLASSES = frozenset({ModelKind.SCORES, ModelKind.CLASSES})


@dataclass(frozen=True, slots=True)
class Route:
    """`methods` are separated by spaces. `needs` are the kinds of model that can answer it.

    `flag` is the option that enables it, empty if it is always enabled; `media_types` are those of a successful answer;
    with `says_no` a negative answer is a 503 with the same body. `required` are fields that the endpoint checks by
    hand. With `queues` the route's prompts wait for instances: if the queue is full, the request is refused unread.
    `api_format` is that of its errors, `query` the JSON schema of each parameter of its URL. A route with a `body` has
    an `example` of it, small and valid.
    """

    methods: str
    path: str
    endpoint: Endpoint
    tag: str
    summary: str
    body: type[Body] | None = None
    needs: frozenset[ModelKind] = ANY_MODEL
    flag: str = ""
    media_types: tuple[str, ...] = ("application/json",)
    says_no: bool = False
    required: tuple[str, ...] = ()
    queues: bool = False
    api_format: ApiFormat = OPENAI_FORMAT
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    example: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.body is None or self.example is not None, f"{self.path} needs an example of its body"

    def is_open(self, options: SchedulerOptions) -> bool:
        """Whether the route is enabled."""
        return not self.flag or bool(getattr(options, self.flag))

    def check_model(self, kind: ModelKind) -> None:
        """Raise InvalidRequest if a model of this kind can never answer."""
        check_kind(kind, self.needs, self.path)


def check_kind(kind: ModelKind, needs: frozenset[ModelKind], what: str) -> None:
    """Raise InvalidRequest if a model of `kind` can never answer `what`, which needs one of `needs`."""
    if kind not in needs:
        wanted = " or ".join(needed.does for needed in ModelKind if needed in needs)
        raise InvalidRequest(f"the model {kind.does}; {what} needs one that {wanted}", "model")
