"""Run a pooling request and collect its vectors, and compare two vectors."""

import math
from collections.abc import Callable, Sequence

from scheduler.recorded_output import RecordedOutput
from scheduler.request import Dispatcher, GenerationRequest, PromptDone
from wire.errors import InternalError

Values = tuple[float, ...]


async def collect_vectors(
    dispatcher: Dispatcher, request: GenerationRequest, on_done: Callable[[PromptDone], None] = lambda done: None
) -> list[Values]:
    """Return the vector (or the score, as the only value) of each prompt, in order. Raises the request's error.

    Calls `on_done` for each prompt that has finished, at the end.
    """
    output = RecordedOutput()
    try:
        await dispatcher.run(request, output)
    finally:
        for done in output.done.values():
            on_done(done)
    found, num_prompts = output.vectors, len(request.prompts)
    if len(found) != num_prompts:
        raise InternalError(f"request {request.request_id} ended with {len(found)} of {num_prompts} vectors")
    return [found[prompt] for prompt in range(num_prompts)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors, in [-1, 1]; 0 if one is all zeros. Raises ValueError for unequal lengths."""
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    lengths = math.hypot(*first) * math.hypot(*second)
    return max(-1.0, min(1.0, dot / lengths)) if lengths > 0 else 0.0
