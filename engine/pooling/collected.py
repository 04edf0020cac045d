"""A prompt's pooled hidden states, accumulated chunk by chunk. Plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.pooling.vectors import check_kind, check_numbers, check_one_answer, check_sizes, finish_vector
from engine.pooling_settings import PoolingSettings
from wire.errors import InvalidRequest
from wire.types import Pooling, PromptState


@dataclass(slots=True)
class Collected:
    """Mutable, owned by its prompt: the sum of its tokens' states for mean pooling, else the one state used.

    For kinds with values for each token it has all states, one after another.
    """

    pooling: Pooling
    values: list[float] = field(default_factory=list)

    @property
    def is_mean(self) -> bool:
        """Whether the vector is the mean over all tokens."""
        return self.pooling.how == "mean" and not self.pooling.of_tokens

    @property
    def uses_cache(self) -> bool:
        """Whether cached KV may be used, because the result does not need the states of cached tokens."""
        return self.pooling.how == "last" and not self.pooling.of_tokens

    def wanted(self, start: int, count: int, num_tokens: int) -> range:
        """Return which of tokens [start, start + count), in a prompt of `num_tokens`, are pooled."""
        if self.is_mean or self.pooling.of_tokens:
            return range(start, start + count)
        token = 0 if self.pooling.how == "cls" else num_tokens - 1
        return range(token, token + 1) if start <= token < start + count else range(0)

    def take(self, values: Sequence[float]) -> None:
        """Add a chunk's sum of states, or append its states."""
        if self.pooling.of_tokens:
            self.values.extend(values)
        else:
            self.values = [a + b for a, b in zip(self.values, values, strict=True)] if self.values else list(values)

    def finish(self, num_tokens: int, settings: PoolingSettings) -> tuple[float, ...]:
        """Return the result of a prompt of `num_tokens`. Raises InternalError if it has NaN or infinite values."""
        divisor, count = num_tokens if self.is_mean else 1, num_tokens if self.pooling.of_tokens else 1
        width = len(self.values) // count
        found: list[float] = []
        for at in range(0, len(self.values), width):
            state = [value / divisor for value in self.values[at : at + width]]
            found += finish_vector(state, self.pooling, settings)
        check_numbers(found)
        return tuple(found)


def resolve(state: PromptState, settings: PoolingSettings | None) -> PromptState:
    """Return the state with its pooling mode set: its own, or the model's default."""
    if state.pooling is None or settings is None:
        return state
    return replace(state, pooling=replace(state.pooling, how=state.pooling.how or settings.how))


def check_decoder_pooling(state: PromptState, settings: PoolingSettings | None, hidden_size: int, name: str) -> None:
    """Raise InvalidRequest for pooling that a decoder cannot do. A prompt without pooling is not checked."""
    if state.pooling is None:
        return
    if settings is None:
        raise InvalidRequest(f"{name} does not support vectors", "model")
    check_kind(state.pooling.kind, ("embed", "token_embed"), name)
    check_one_answer(state.params)
    check_sizes(state.pooling, len(state.token_ids), hidden_size)
