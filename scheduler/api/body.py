"""The base of all request bodies: unknown fields are ignored, null means the default, types are strict."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from scheduler.api.refusals import NOT_SERVED, Refusal
from wire.errors import InvalidRequest
from wire.types import PARAMETERS

Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
ManyIds = Annotated[list[int], Field(fail_fast=True)]
"""A list that may be long: only its first invalid item is reported."""
Salt = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
_MAX_SHOWN_ERRORS = 10
_MAX_ERRORS = 1000


def bounds(name: str) -> Any:
    """Return the pydantic field that enforces a sampling parameter's bounds."""
    client = PARAMETERS[name].client
    minimum, maximum = client.minimum, None if client.maximum == math.inf else client.maximum
    return Field(ge=None if client.above else minimum, gt=minimum if client.above else None, le=maximum)


def max_length(name: str) -> Any:
    """Return the pydantic field that limits the length of a sampling parameter's list."""
    return Field(max_length=int(PARAMETERS[name].client.maximum))


class Body(BaseModel):
    """Base of all bodies, one class per route, used by HTTP, batch lines and the OpenAPI document."""

    model_config = ConfigDict(strict=True, frozen=True)
    not_served: ClassVar[Mapping[str, Refusal]] = NOT_SERVED

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Return the checked body. Raises InvalidRequest that names each wrong field, its value and its limit."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            if (count := error.error_count()) > _MAX_ERRORS:
                raise InvalidRequest(
                    f"{count} values of the body are invalid, but at most {_MAX_ERRORS} are reported: check the "
                    "types of its fields"
                ) from None
            found = error.errors(include_url=False, include_context=False)[:_MAX_SHOWN_ERRORS]
        raise InvalidRequest("; ".join(map(_text, found)), _path(found[0]))


def _path(entry: ErrorDetails) -> str:
    return ".".join(map(str, entry["loc"]))


def _text(entry: ErrorDetails) -> str:
    if entry["type"] == "missing":
        return f"{_path(entry)} is missing"
    value, message = entry["input"], entry["msg"]
    shown = repr(value)[:40] if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
    return f"{_path(entry)}: {message[:1].lower()}{message[1:]}, got {shown} ({entry['type']})"
