"""The sequence length that determines a token's rotation, for RoPE types that depend on it. Pure, no torch.

    rope type | frequencies up to `short_length` | beyond it         | `short_length`
    dynamic   | the model's own                  | a set per length  | max_position_embeddings
    longrope  | the short set                    | the long set      | original_max_position_embeddings

transformers computes a prompt in one pass, rotated by the prompt's length, and then each token by the sequence length
including it; earlier keys do not change. So a token's length is the prompt's, or its own position + 1 if that is more:
the same for any chunks, batch, instance or resumption. Some models recompute a sequence that outgrows `short_length`;
its first `short_length` + 1 tokens then count as its prompt.
"""

from dataclasses import dataclass
from typing import Any

from engine.models.families import support_of
from wire.errors import ConfigError

DYNAMIC, LONGROPE = "dynamic", "longrope"
LENGTH_TYPES = (DYNAMIC, LONGROPE)


@dataclass(frozen=True, slots=True)
class RopeLengths:
    """A model's rope type, one of LENGTH_TYPES; sequences of up to `short_length` tokens have the short frequencies.

    `recomputes`: all keys of a sequence that outgrows `short_length` are recomputed with the long frequencies.
    """

    rope_type: str
    short_length: int
    recomputes: bool = False

    def counted_prompt(self, prompt_length: int, num_tokens: int) -> int:
        """Return how many of its first tokens count as the prompt in a sequence of `num_tokens`."""
        crossed = self.recomputes and num_tokens > self.short_length
        return max(prompt_length, self.short_length + 1) if crossed else prompt_length

    def drops_prompt(self, prompt_length: int, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` was recomputed, and so shares no KV with its prompt."""
        return self.counted_prompt(prompt_length, num_tokens) > prompt_length

    def rotation(self, prompt_length: int) -> str:
        """Return a name for the prompt's rotation: equal tokens have equal keys only if these names are equal."""
        if prompt_length <= self.short_length:
            return ""  # tokens beyond that are rotated by their own position, whatever the prompt
        return f"{self.rope_type} {prompt_length}" if self.rope_type == DYNAMIC else self.rope_type


def rope_lengths(text_config: Any) -> RopeLengths | None:
    """Return how the model's rotation depends on lengths, None if it does not. Raises ConfigError."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for name, value in parameters.items():
        if isinstance(value, dict) and value.get("rope_type") in LENGTH_TYPES:
            raise ConfigError(f"rope type {value['rope_type']} applies only to {name} layers: not supported")
    rope_type = parameters.get("rope_type")
    if rope_type not in LENGTH_TYPES:
        return None
    if rope_type == DYNAMIC:
        return RopeLengths(rope_type, text_config.max_position_embeddings)
    short_length = parameters["original_max_position_embeddings"]
    return RopeLengths(
        rope_type, short_length, recomputes=support_of(text_config.model_type).drops_kv_past_short_length
    )


def longest_sequence(text_config: Any) -> int | None:
    """Return the longest sequence that the config allows, in tokens, None if it has no limit.

    For rope type dynamic, scaling starts at max_position_embeddings and the limit is `factor` times that.
    """
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if own is not None and parameters.get("rope_type") == DYNAMIC:
        return int(own * parameters["factor"])
    return own


def token_lengths(start: int, count: int, prompt_length: int) -> list[int]:
    """Return the length that rotates each of the tokens [start, start + count) of a sequence."""
    return [max(prompt_length, position + 1) for position in range(start, start + count)]
