"""Names of KV blocks derived from their tokens, so that computed KV can be found and reused. Pure.

    digest = sha256(parent digest, the 16 token ids as little-endian int32, the images among them, salt)
    first  = the digest whose parent is sha256(root)
    root   = the weights' digest, their dtype, and the name of a special rotation of the keys, if any
    images = start (8 bytes, little-endian) and digest of each image that stands for one of these tokens
    block  = a whole number of digests, named by its last one

A name depends on every token from the first one on, so it is the same on every instance and at every block size.
Prompts with different salt or root have no name in common, nor do prompts whose equal ids stand for different images.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from wire.prompt_images import marks_within
from wire.types import PromptImage

DIGEST_TOKENS = 16

_IDS = struct.Struct(f"<{DIGEST_TOKENS}i")


class BlockName(NamedTuple):
    """The name of a full block: its last digest, its parent's digest, its tokens, salt, root and images.

    Two names are equal only if the tokens are: a collision of digests is not a cache hit.
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    salt: str
    root: str
    images: bytes = b""


def why_no_names(block_size: int) -> str | None:
    """Return why blocks of that size have no names, for a message; None if they have names."""
    if block_size % DIGEST_TOKENS == 0:
        return None
    return f"a block size of {block_size} tokens is not a multiple of {DIGEST_TOKENS}"


class PrefixChain:
    """The names of one sequence's full blocks, each computed once. Mutable; tokens already named never change."""

    __slots__ = ("_block_size", "_images", "_limit", "_names", "_root", "_salt", "_salt_bytes")

    def __init__(
        self, salt: str, block_size: int | None, root: str = "", images: Sequence[PromptImage] = (),
        limit: float = math.inf,
    ) -> None:  # fmt: skip
        """`block_size` None: nothing is named. `root`: what else KV depends on, such as the model.

        Only blocks of the first `limit` tokens are named.
        """
        assert block_size is None or why_no_names(block_size) is None
        self._salt, self._salt_bytes, self._block_size = salt, salt.encode(), block_size
        self._root, self._images, self._limit = root, images, limit
        self._names: list[BlockName] = []

    def num_full(self, num_tokens: int) -> int:
        """Return how many blocks of `num_tokens` tokens have a name."""
        return 0 if self._block_size is None else int(min(num_tokens, self._limit) // self._block_size)

    def num_tokens(self, num_blocks: int) -> int:
        """Return how many tokens `num_blocks` named blocks hold."""
        return 0 if self._block_size is None else num_blocks * self._block_size

    def names(self, token_ids: Sequence[int], num_tokens: int) -> list[BlockName]:
        """Return the names of the full blocks among the first `num_tokens` of `token_ids`, in order."""
        wanted = self.num_full(num_tokens)
        while len(self._names) < wanted:
            self._names.append(self._next(token_ids))
        return self._names[:wanted]

    def name(self, index: int, token_ids: Sequence[int]) -> BlockName:
        """Return the name of block `index`, which `token_ids` fill."""
        if index >= len(self._names):
            assert self._block_size is not None
            self.names(token_ids, (index + 1) * self._block_size)
        return self._names[index]

    def fork(self) -> "PrefixChain":
        """Return a chain that continues from the same names."""
        copy = PrefixChain(self._salt, self._block_size, self._root, self._images, self._limit)
        copy._names = self._names.copy()
        return copy

    def _next(self, token_ids: Sequence[int]) -> BlockName:
        assert self._block_size is not None
        start = len(self._names) * self._block_size
        own = tuple(token_ids[start : start + self._block_size])
        parent = self._names[-1].digest if self._names else hashlib.sha256(self._root.encode()).digest()
        digest, salt = parent, self._salt_bytes
        for at in range(0, self._block_size, DIGEST_TOKENS):
            images = marks_within(self._images, start + at, start + at + DIGEST_TOKENS)
            digest = hashlib.sha256(digest + _IDS.pack(*own[at : at + DIGEST_TOKENS]) + images + salt).digest()
        marks = marks_within(self._images, start, start + self._block_size)
        return BlockName(digest, parent, own, self._salt, self._root, marks)
