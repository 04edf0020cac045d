"""The embeddings of one image, as they leave the tower, and the limits on computing them. Imports no torch."""

from dataclasses import dataclass

from images.token_count import ImageTokens

MIB = 2**20


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The tokens of an image, and for each of them its row of `hidden_size` values in the engine's dtype."""

    tokens: ImageTokens
    values: bytes


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Limits on the encoder.

    `encode_s` is the longest time for one image, `start_s` for loading the tower; `memory_bytes` is what the child
    may take above the tower itself (on a CPU). `queue_length` images may wait, `cache_bytes` of embeddings are kept.
    """

    encode_s: float = 60.0
    start_s: float = 600.0
    memory_bytes: int = 4096 * MIB
    queue_length: int = 1024
    cache_bytes: int = 1024 * MIB
