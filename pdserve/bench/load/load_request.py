"""One request of a load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or as token ids, and the maximum tokens of its answer."""

    prompt: str | tuple[int, ...]
    max_tokens: int
