"""The arithmetic model's output, token by token: each token's KV extends one checksum for each KV tensor."""

import zlib
from collections.abc import Sequence
from copy import copy

from engine.finish import banned_tokens
from engine.step import SampleRow
from testing.engine.fake_model import FakeConfig, fake_tensors, kv_bytes, tensor_read_at
from testing.engine.fake_output import choose_token, logprobs_of
from wire.kv_layout import Heads
from wire.types import SamplingParams, TokenLogprobs

KvEntry = tuple[int, int]
"""The KV of one token: its id, and the salt of the worker that computed it."""


class FakeContinuation:
    """One sequence on top of the KV of its prompt. Its tokens are those of `expected_tokens`."""

    def __init__(self, config: FakeConfig, prompt: Sequence[int], kv: Sequence[KvEntry]) -> None:
        """`kv` has an entry for each token of the prompt; the output depends on it."""
        self.token_ids = list(prompt)
        self._config, self._tensors = config, fake_tensors(config)
        self._checksums = [0] * len(self._tensors)
        self._kv_length = 0
        self._prefixes: list[int] = []
        for entry in kv:
            self._write(entry)
            self._prefixes.append(self._checksum)

    def fork(self) -> "FakeContinuation":
        """Return an independent copy."""
        other = copy(self)
        other.token_ids, other._checksums = list(self.token_ids), list(self._checksums)
        return other

    def next_token(self, params: SamplingParams, sequence: int, position: int) -> tuple[int, TokenLogprobs]:
        """Choose and append output `position` of this sequence of the prompt."""
        sample = SampleRow(0, params, sequence, position, banned_tokens(params, position, self.token_ids))
        size, checksum = self._config.vocab_size, self._checksum
        token_id = choose_token(checksum, sample, size)
        assert token_id is not None, "a token is left to choose"
        self.token_ids.append(token_id)
        self._write((token_id, self._config.salt))
        return token_id, logprobs_of(checksum, token_id, params.wanted_logprobs, size)

    def prompt_logprobs(self, top: int) -> list[TokenLogprobs | None]:
        """Return the log probabilities of the prompt's tokens; the first has none."""
        scored = zip(self._prefixes, self.token_ids[1:], strict=False)
        return [None, *(logprobs_of(c, token_id, top, self._config.vocab_size) for c, token_id in scored)]

    @property
    def _checksum(self) -> int:
        return self._checksums[tensor_read_at(self._kv_length, len(self._tensors))]

    def _write(self, entry: KvEntry) -> None:
        token_id, salt = entry
        for tensor, spec in enumerate(self._tensors):
            data = kv_bytes(token_id, self._kv_length, tensor, salt, spec.head_bytes, Heads(0, spec.heads))
            self._checksums[tensor] = zlib.crc32(data, self._checksums[tensor])
        self._kv_length += 1
