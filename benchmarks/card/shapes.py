"""The measured models: shapes of the Llama family with random weights, and the minimal work of one step.

weights read  | every matrix once except the embedding's, of which a step reads a few rows
floating ops  | 2 per weight and token, 4 per (query, attended key, head, head dimension)
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """One model. `context` tokens precede a decode step; a prefill has `prompts` of `prompt_tokens`."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    context: int
    batches: tuple[int, ...]
    prompts: int
    prompt_tokens: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Elements of the output matrix."""
        return self.hidden * self.vocab_size

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def decode_bytes(self, batch: int) -> int:
        """Return the fewest bytes that a step of `batch` sequences reads: weights, and the KV of each sequence."""
        weights = (self.layer_weights + self.head_weights) * self.itemsize
        return weights + batch * (self.context + 1) * self.kv_token_bytes

    def prefill_operations(self) -> int:
        """Return the floating point operations of all prompts; only their last rows are multiplied by the head."""
        tokens = self.prompts * self.prompt_tokens
        seen = self.prompts * self.prompt_tokens * (self.prompt_tokens + 1) // 2
        attended = 4 * seen * self.num_layers * self.num_heads * self.head_dim
        return 2 * tokens * self.layer_weights + 2 * self.prompts * self.head_weights + attended

    def config(self) -> dict[str, Any]:
        """Return the fields of transformers' LlamaConfig."""
        return {
            "num_hidden_layers": self.num_layers, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size, "max_position_embeddings": 4 * max(self.context, self.prompt_tokens),
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


ONE_B = Shape("1B", 16, 2048, 8192, 32, 8, 64, 128_256, "bfloat16", 2048, (1, 8, 64), 4, 2048)
EIGHT_B = Shape("8B", 32, 4096, 14_336, 32, 8, 128, 128_256, "bfloat16", 2048, (1, 8, 64), 4, 2048)
TINY = Shape("tiny", 2, 64, 96, 4, 2, 16, 1024, "float32", 24, (1, 3), 4, 24)
SHAPES = {"1b": ONE_B, "8b": EIGHT_B}
