"""Read a request's body as the class of its route: every field implemented, refused, or without an effect by nature."""

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from scheduler.api.body import read_json
from scheduler.api.refusals import refuse_fields
from scheduler.api.schemas import Body
from scheduler.front import Front

AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(front: Front, request: Request, kind: type[AnyBody]) -> AnyBody:
    """Return the request's checked body. Raises InvalidRequest, HttpError (408, 413, 415) or ClientGone."""
    return check_body(await read_json(request, front.config.options), kind, request)


def check_body(raw: Mapping[str, Any], kind: type[AnyBody], request: Request) -> AnyBody:
    """Return `raw` as `kind`. Raises InvalidRequest naming the field."""
    refuse_fields(raw)
    return kind.read(raw)
