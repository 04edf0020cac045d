"""The common fields of the bodies that request vectors and scores."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from scheduler.api.body import Body, Priority, Salt
from scheduler.api.refusals import POOLING_NOT_SERVED, Refusal


class PoolingBody(Body):
    """The model, truncation, activation, KV sharing and priority."""

    not_served: ClassVar[Mapping[str, Refusal]] = POOLING_NOT_SERVED

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: str | None = None
    user: str | None = None
