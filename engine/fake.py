"""An arithmetic model: real KV bytes in a real pool, and tokens that depend on every one of them. No torch.

Each computed token leaves in each KV tensor bytes made of (token id, position, tensor, salt of the instance), and the
next token is a checksum of the KV read back through the block table. So an answer shows which instance computed which
part, and that the bytes arrived whole: `expected_tokens` says what it must be.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.counter_hash import hash64, uniform
from engine.ending import banned_tokens
from engine.host_pool import HostPool
from engine.interface import BatchSequence, EngineInfo, SampleRow, StepBatch
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import ModelIdentity, SamplingParams


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """What a fake model looks like. `salt` is the instance's own; all else has to agree between instances.

    A step takes `step_seconds`, and `token_seconds` more for each token in it.
    """

    salt: int = 0
    name: str = "fake"
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 4
    dtype: str = "float32"
    vocab_size: int = 1000
    max_model_len: int = 512
    block_size: int = 16
    num_blocks: int = 256
    eos_token_ids: tuple[int, ...] = (0,)
    step_seconds: float = 0.0
    token_seconds: float = 0.0


def fake_info(config: FakeConfig) -> EngineInfo:
    """Return what an engine over this fake says about itself."""
    return EngineInfo(
        model=ModelIdentity(config.name, weights_digest=f"{0:016x}", tokenizer_digest=f"{0:016x}"),
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        device="cpu",
        layout=PoolLayout(fake_tensors(config), num_blocks=config.num_blocks, block_size=config.block_size),
        eos_token_ids=config.eos_token_ids,
    )


def fake_tensors(config: FakeConfig) -> tuple[KvTensor, ...]:
    """Return the KV tensors of a fake: k and v of every layer."""
    return tuple(
        KvTensor(layer, name, config.heads, config.head_dim, config.dtype)
        for layer in range(config.num_layers)
        for name in ("k", "v")
    )


class FakeModel:
    """The arithmetic `Model`. Owns its pool: close it."""

    def __init__(self, config: FakeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._info = fake_info(config)
        self._pool = HostPool(self._info.layout)

    @property
    def info(self) -> EngineInfo:
        """What the model and its pool are."""
        return self._info

    @property
    def memory(self) -> HostPool:
        """The pool's memory."""
        return self._pool

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> "Computed":
        """Write the KV of the batch, layer by layer, and choose the tokens."""
        layout = self._info.layout
        seconds = self._config.step_seconds + self._config.token_seconds * len(batch.token_ids)
        for layer in range(layout.num_layers):
            if seconds > 0:
                self._sleep(seconds / layout.num_layers)
            for tensor in layout.tensors_of(layer):
                self._write(tensor, batch)
            if layer_done is not None:
                layer_done(layer)
        ends = _parts_by_last_row(batch.sequences)
        return Computed([self._sample(ends[sample.row], sample) for sample in batch.samples])

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor."""
        layout, buffer = self._info.layout, self._pool.buffer
        for tensor in range(len(layout.tensors)):
            (old,) = layout.runs(tensor, [source], 0, layout.block_size)
            (new,) = layout.runs(tensor, [target], 0, layout.block_size)
            buffer[new.offset : new.offset + new.length] = buffer[old.offset : old.offset + old.length]

    def close(self) -> None:
        """Give the pool's memory back. Idempotent."""
        self._pool.close()

    def _write(self, tensor: int, batch: StepBatch) -> None:
        layout, buffer, salt, row = self._info.layout, self._pool.buffer, self._config.salt, 0
        size = layout.tensors[tensor].token_bytes
        for part in batch.sequences:
            token_ids = batch.token_ids[row : row + part.count]
            data = b"".join(kv_bytes(t, part.start + i, tensor, salt, size) for i, t in enumerate(token_ids))
            written = 0
            for run in layout.runs(tensor, part.block_ids, part.start, part.kv_length):
                buffer[run.offset : run.offset + run.length] = data[written : written + run.length]
                written += run.length
            row += part.count

    def _sample(self, part: BatchSequence, sample: SampleRow) -> int:
        layout, buffer = self._info.layout, self._pool.buffer
        tensor = tensor_read_at(part.kv_length, len(layout.tensors))
        runs = layout.runs(tensor, part.block_ids, 0, part.kv_length)
        checksum = _checksum(buffer[run.offset : run.offset + run.length] for run in runs)
        return choose_token(checksum, sample, self._config.vocab_size)


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is done already."""

    token_ids: list[int]

    def collect(self) -> list[int]:
        """Return the tokens."""
        return self.token_ids


def kv_bytes(token_id: int, position: int, tensor: int, salt: int, size: int) -> bytes:
    """Return the `size` bytes that instance `salt` leaves for one token in one tensor."""
    word = hash64(token_id << 40 ^ position << 16 ^ tensor, salt).to_bytes(8, "little")
    return (word * -(-size // 8))[:size]


def tensor_read_at(kv_length: int, num_tensors: int) -> int:
    """Return which tensor the next token is a checksum of: all in turn, so a few tokens prove them all."""
    return kv_length % num_tensors


def choose_token(checksum: int, sample: SampleRow, vocab_size: int) -> int:
    """Return the token: greedy by the checksum alone, else also by the draw; banned ids are stepped over."""
    params = sample.params
    draw = 0 if params.temperature == 0 else int(uniform(params.seed, sample.sequence, sample.position) * (1 << 24))
    first, banned = hash64(checksum, draw), set(sample.banned)
    return next((first + i) % vocab_size for i in range(vocab_size) if (first + i) % vocab_size not in banned)


def expected_tokens(
    config: FakeConfig,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    count: int,
    salts: Sequence[int],
    sequence: int = 0,
) -> tuple[int, ...]:
    """Return the first `count` output tokens of `prompt`, whatever would end them.

    `salts[i]` is the salt of the instance that computed the KV of token i; past its end the last one goes on. So a
    prompt of 9 tokens that crosses from salt 1 to salt 2 has salts [1] * 9 + [2].
    """
    tensors, token_ids = fake_tensors(config), list(prompt)
    for position in range(count):
        tensor = tensor_read_at(len(token_ids), len(tensors))
        size = tensors[tensor].token_bytes
        checksum = _checksum(
            kv_bytes(token_id, i, tensor, salts[min(i, len(salts) - 1)], size) for i, token_id in enumerate(token_ids)
        )
        sample = SampleRow(0, params, sequence, position, banned_tokens(params, position))
        token_ids.append(choose_token(checksum, sample, config.vocab_size))
    return tuple(token_ids[len(prompt) :])


def _checksum(parts: Iterable[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _parts_by_last_row(parts: Iterable[BatchSequence]) -> dict[int, BatchSequence]:
    by_row, row = {}, 0
    for part in parts:
        row += part.count
        by_row[row - 1] = part
    return by_row
