"""Run a pooling request and collect its vectors, and compare two vectors."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from scheduler.request import Dispatcher, GenerationRequest, PathEvent, PromptDone, Vector
from wire.errors import InternalError

Values = tuple[float, ...]


async def collect_vectors(
    dispatcher: Dispatcher, request: GenerationRequest, on_done: Callable[[PromptDone], None] = lambda done: None
) -> list[Values]:
    """Return the vector (or the score, as the only value) of each prompt, in order. Raises the request's error.

    Calls `on_done` for each prompt.
    """
    found: dict[int, Values] = {}
    running = dispatcher.start(request)
    async with aclosing(cast("AsyncGenerator[PathEvent, None]", running.events())) as events:
        async for event in events:
            if isinstance(event, Vector):
                found[event.prompt] = event.values
            elif isinstance(event, PromptDone):
                on_done(event)
    if len(found) != len(request.prompts):
        raise InternalError(f"request {request.request_id} ended with {len(found)} of {len(request.prompts)} vectors")
    return [found[prompt] for prompt in range(len(request.prompts))]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors, in [-1, 1]; 0 if one is all zeros. Raises ValueError for unequal lengths."""
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    lengths = math.hypot(*first) * math.hypot(*second)
    return max(-1.0, min(1.0, dot / lengths)) if lengths > 0 else 0.0
