"""How long a sequence counts as, where a token's rotation depends on that. Pure, no torch.

    rope type | frequencies up to the border | past it           | border
    dynamic   | the model's own              | a set a length    | max_position_embeddings
    longrope  | the short set                | the long set      | original_max_position_embeddings

transformers computes a prompt in one pass, rotated by the prompt's length, and then each token by the sequence's length
with it; keys stay as they were. So a token's length is the prompt's, or its own place + 1 where that is more: the same
in whatever chunks, batch, instance or resumption it is computed. Some models compute a sequence anew as it crosses the
border; its first border + 1 tokens then count as its prompt.
"""

from dataclasses import dataclass
from typing import Any

from wire.errors import ConfigError

DYNAMIC, LONGROPE = "dynamic", "longrope"
LENGTH_TYPES = (DYNAMIC, LONGROPE)
_COMPUTED_ANEW = frozenset({"phi3"})  # transformers' generate drops their cache there


@dataclass(frozen=True, slots=True)
class RopeLengths:
    """A model's rope type, one of LENGTH_TYPES, and the longest sequence that has the frequencies of short ones.

    `computes_anew`: all keys of a sequence that grows past the border are those of long ones from then on.
    """

    rope_type: str
    border: int
    computes_anew: bool = False

    def counted_prompt(self, prompt_length: int, num_tokens: int) -> int:
        """Return how many of a sequence's first tokens are computed as its prompt, once it has `num_tokens`."""
        crossed = self.computes_anew and num_tokens > self.border
        return max(prompt_length, self.border + 1) if crossed else prompt_length

    def drops_prompt(self, prompt_length: int, num_tokens: int) -> bool:
        """Whether a sequence that has grown to `num_tokens` was computed anew, and shares no KV of its prompt."""
        return self.counted_prompt(prompt_length, num_tokens) > prompt_length

    def rotation(self, prompt_length: int) -> str:
        """Return what sets a prompt's keys apart from those of like tokens in prompts of another length."""
        if prompt_length <= self.border:
            return ""  # tokens past the border were rotated by their own place, whatever the prompt
        return f"{self.rope_type} {prompt_length}" if self.rope_type == DYNAMIC else self.rope_type


def rope_lengths(text_config: Any) -> RopeLengths | None:
    """Return how the model's rotation depends on lengths, None where it does not. Raises ConfigError in words."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for name, value in parameters.items():
        if isinstance(value, dict) and value.get("rope_type") in LENGTH_TYPES:
            raise ConfigError(f"rope type {value['rope_type']} of {name} layers alone follows a length: not supported")
    rope_type = parameters.get("rope_type")
    if rope_type not in LENGTH_TYPES:
        return None
    if rope_type == DYNAMIC:
        return RopeLengths(rope_type, text_config.max_position_embeddings)
    border = parameters["original_max_position_embeddings"]
    return RopeLengths(rope_type, border, computes_anew=text_config.model_type in _COMPUTED_ANEW)


def longest_sequence(text_config: Any) -> int | None:
    """Return the tokens that the config allows a sequence, None where it does not say.

    max_position_embeddings of rope type dynamic is where its scaling begins; it ends `factor` times as far.
    """
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if own is not None and parameters.get("rope_type") == DYNAMIC:
        return int(own * parameters["factor"])
    return own


def token_lengths(start: int, count: int, prompt_length: int) -> list[int]:
    """Return the length that rotates each of the tokens [start, start + count) of a sequence."""
    return [max(prompt_length, position + 1) for position in range(start, start + count)]
