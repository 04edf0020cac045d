"""What the bodies of the routes that read texts for vectors and scores share."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from scheduler.api.refusals import POOLING_NOT_SERVED, Refusal
from scheduler.api.schemas import Body, Priority, Salt


class PoolingBody(Body):
    """The model, how texts are cut, whose KV they may share, and when they are read."""

    not_served: ClassVar[Mapping[str, Refusal]] = POOLING_NOT_SERVED

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: str | None = None
    user: str | None = None
