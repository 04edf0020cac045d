"""Read a request's body as its route's class: each field is implemented, refused, or harmless to ignore."""

import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from scheduler.api.body import Body
from scheduler.api.near_names import near_name
from scheduler.api.read_json import read_json
from scheduler.api.refusals import WITHOUT_EFFECT, refuse_fields
from scheduler.app_context import AppContext

AnyBody = TypeVar("AnyBody", bound=Body)
_NAME = re.compile("[A-Za-z0-9_.-]+")  # safe in headers and logs
_LONGEST, _MAX_UNKNOWN = 40, 8


async def read_body(
    context: AppContext, request: Request, kind: type[AnyBody], *, accepts_form: bool = False
) -> AnyBody:
    """Return the request's checked body. Raises InvalidRequest, HttpError (408, 413, 415) or ClientGone."""
    return check_body(await read_json(request, context.config.options, accepts_form=accepts_form), kind, request)


def check_body(raw: Mapping[str, Any], kind: type[AnyBody], request: Request) -> AnyBody:
    """Return `raw` as `kind`. Raises InvalidRequest naming the field.

    Unknown names are ignored; one that is nearly a known field is reported in the log and in a Warning header.
    """
    refuse_fields(raw, kind.not_served)
    body = kind.read(raw)
    if meant := _misspelt_fields(raw, kind):
        text = ", ".join(
            f"{name} is not a known field and has no effect: did you mean {known}?" for name, known in meant
        )
        state = request.scope["state"]
        state["warning"] = f'199 pdserve "{text}"'
        state["refusals"].warning("unknown_fields", "unknown_fields", request_id=state["request_id"], fields=text)
    return body


@functools.cache
def _known_fields(kind: type[Body]) -> frozenset[str]:
    return frozenset((*kind.model_fields, *kind.not_served, *WITHOUT_EFFECT))


def _misspelt_fields(raw: Mapping[str, Any], kind: type[Body]) -> list[tuple[str, str]]:
    """Return unknown names, at most the first few, each with the known name that it nearly matches."""
    known = _known_fields(kind)
    unknown = [name for name in raw if name not in known and len(name) <= _LONGEST and _NAME.fullmatch(name)]
    return [(name, meant) for name in unknown[:_MAX_UNKNOWN] if (meant := near_name(name, known))]
