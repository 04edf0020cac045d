"""One path of the HTTP surface: who answers it, with which body, and what the API's description says of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp

from scheduler.api.schemas import Body
from scheduler.app_context import AppContext
from scheduler.config import SchedulerOptions
from scheduler.model.kind import ModelKind
from wire.errors import InvalidRequest

Endpoint = Callable[[AppContext, Request], Awaitable[ASGIApp]]

ANY_MODEL = frozenset(ModelKind)
TEXT = frozenset({ModelKind.TEXT})
VECTORS = frozenset({ModelKind.TEXT, ModelKind.VECTORS})


@dataclass(frozen=True, slots=True)
class Route:
    """`methods` are separated by blanks. `needs` are the kinds of model that can answer it.

    `flag` is the option that opens it, empty where it is open; `media_types` are what a good answer may be; one that
    `says_no` answers 503 with the same body where the answer is no. `required` are fields that the body's endpoint
    asks for by hand. One that `queues` makes prompts that wait for instances: a full queue refuses it unread.
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

    def is_open(self, options: SchedulerOptions) -> bool:
        """Whether the operator opened it."""
        return not self.flag or bool(getattr(options, self.flag))

    def check_model(self, kind: ModelKind) -> None:
        """Raise InvalidRequest where a model of this kind can never answer."""
        check_kind(kind, self.needs, self.path)


def check_kind(kind: ModelKind, needs: frozenset[ModelKind], what: str) -> None:
    """Raise InvalidRequest where a model of `kind` can never answer `what`, which needs one of `needs`."""
    if kind not in needs:
        wanted = " or ".join(needed.does for needed in ModelKind if needed in needs)
        raise InvalidRequest(f"the model {kind.does}; {what} needs one that {wanted}", "model")
