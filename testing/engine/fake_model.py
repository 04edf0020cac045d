"""An arithmetic model: real KV bytes in real pools, and tokens that depend on every one of them. No torch.

For each computed token, each head of each KV tensor gets bytes made of (token id, position, tensor, head, salt of the
instance), and the next token is a checksum of the KV of all heads, read back through the block table. So the output
shows which instance computed which part, and that all bytes arrived at the right place: `expected_tokens` returns what
it must be. With several ranks each has a pool of its heads; where heads are replicated, the copies are read in turn.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from devices.host_pool import HostPool
from engine.finish import banned_tokens
from engine.interface import EngineInfo
from engine.kv.block_store import BlockStore
from engine.pooling_settings import PoolingSettings
from engine.sampling.counter_hash import hash64
from engine.step import BatchSequence, PendingStep, SampleRow, StepBatch, StepOutput
from testing.engine.fake_output import answer, checksum_of, choose_token, part_until, rows_read
from testing.engine.fake_queue import LaunchQueue
from wire.description import ModelIdentity
from wire.kv_layout import Heads, KvTensor, PoolLayout, Rank, ranks_holding
from wire.types import SamplingParams

_HEAD_STEP = 0x9E3779B97F4A7C15  # odd, so heads differ in every byte's low bits and upwards


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Parameters of a fake model. `salt` differs per instance; all others must be equal in all instances.

    A step takes `step_seconds`, and `token_seconds` more for each token in it. `kv_tensors` lists (layer, name, heads,
    head_dim) per tensor, instead of k and v of `heads` x `head_dim` in each of `num_layers`; a layer may have none.
    `runs_ahead`: a step is computed only when its result or its blocks are needed, as on a slow device. Layers are
    reported at launch, as on devices, but a host pool has no event to wait for: such an instance cannot hand off
    prompts.
    """

    salt: int = 0
    name: str = "fake"
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 4
    kv_tensors: tuple[tuple[int, str, int, int], ...] = ()
    ranks: int = 1
    dtype: str = "float32"
    vocab_size: int = 1000
    max_model_len: int = 512
    block_size: int = 16
    num_blocks: int = 256
    eos_token_ids: tuple[int, ...] = (0,)
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    runs_ahead: bool = False
    takes_images: bool = False
    images_attend_within: bool = False


def fake_info(config: FakeConfig) -> EngineInfo:
    """Return the EngineInfo of an engine over this fake."""
    return EngineInfo(
        model=ModelIdentity(config.name, weights_digest=f"{0:016x}", tokenizer_digest=f"{0:016x}"),
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        device="cpu",
        layout=PoolLayout(fake_tensors(config), num_blocks=config.num_blocks, block_size=config.block_size),
        eos_token_ids=config.eos_token_ids,
        pooling=PoolingSettings("last", normalize=False),
        hidden_size=2,
        takes_images=config.takes_images,
        images_attend_within=config.images_attend_within,
    )


def fake_tensors(config: FakeConfig) -> tuple[KvTensor, ...]:
    """Return the KV tensors of a fake, over all ranks: k and v of every layer, or the configured `kv_tensors`."""
    if config.kv_tensors:
        return tuple(KvTensor(*tensor, config.dtype) for tensor in config.kv_tensors)
    return tuple(
        KvTensor(layer, name, config.heads, config.head_dim, config.dtype)
        for layer in range(config.num_layers)
        for name in ("k", "v")
    )


def fake_layouts(config: FakeConfig) -> tuple[PoolLayout, ...]:
    """Return the pool layout of each rank."""
    return tuple(
        PoolLayout(
            fake_tensors(config), num_blocks=config.num_blocks, block_size=config.block_size,
            rank=Rank(number, config.ranks),
        )
        for number in range(config.ranks)
    )  # fmt: skip


class FakeModel:
    """The arithmetic `Model` of all ranks. Owns their pools until `close`."""

    def __init__(self, config: FakeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._info = fake_info(config)
        self._pools = [HostPool(layout) for layout in fake_layouts(config)]
        self._stores = [BlockStore(pool) for pool in self._pools]
        self._layers = max(config.num_layers, 1 + self._info.layout.layers[-1])
        self._queue = LaunchQueue()

    @property
    def info(self) -> EngineInfo:
        """Properties of the model and its pool."""
        return self._info

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are computed after their launch."""
        return self._config.runs_ahead

    @property
    def memories(self) -> tuple[HostPool, ...]:
        """The pool of each rank."""
        return tuple(self._pools)

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Write the batch's KV layer by layer and choose the tokens; if the model runs ahead, only queue the step."""
        if not self._config.runs_ahead:
            return Computed(self._compute(batch, layer_done))
        launched = self._queue.launch(batch, self._compute)
        if layer_done is not None:
            for layer in range(self._layers):
                layer_done(layer)
        return launched

    def _compute(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> StepOutput:
        layout = self._info.layout
        seconds = self._config.step_seconds + self._config.token_seconds * len(batch.token_ids)
        for layer in range(self._layers):
            if seconds > 0:
                self._sleep(seconds / self._layers)
            for tensor in layout.tensors_of(layer):
                for pool in self._pools:
                    self._write(pool, tensor, batch)
            if layer_done is not None:
                layer_done(layer)
        return answer(batch, [self._checksum_at(batch, row) for row in rows_read(batch)], self._info.vocab_size)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor, after all launched steps; the copy is complete on return."""
        self._queue.run()
        self._copy_block(source, target)

    def _copy_block(self, source: int, target: int) -> None:
        for pool in self._pools:
            layout, buffer = pool.layout, pool.buffer
            for tensor in range(len(layout.tensors)):
                (old,) = layout.runs(tensor, [source], 0, layout.block_size)
                (new,) = layout.runs(tensor, [target], 0, layout.block_size)
                buffer[new.offset : new.offset + new.length] = buffer[old.offset : old.offset + old.length]

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks out of every pool."""
        self._queue.run()
        for store in self._stores:
            store.save(block_ids, slots)

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy saved blocks back into every pool."""
        self._queue.run()
        for store in self._stores:
            store.load(slots, block_ids)

    def close(self) -> None:
        """Free the pools' memory. Idempotent."""
        for pool in self._pools:
            pool.close()

    def _write(self, pool: HostPool, tensor: int, batch: StepBatch) -> None:
        layout, buffer, salt, row = pool.layout, pool.buffer, self._config.salt, 0
        size, heads = layout.tensors[tensor].head_bytes, layout.heads[tensor]
        for part in batch.sequences:
            token_ids = batch.token_ids[row : row + part.count]
            data = b"".join(kv_bytes(t, part.start + i, tensor, salt, size, heads) for i, t in enumerate(token_ids))
            written = 0
            for run in layout.runs(tensor, part.block_ids, part.start, part.kv_length):
                buffer[run.offset : run.offset + run.length] = data[written : written + run.length]
                written += run.length
            row += part.count

    def _checksum_at(self, batch: StepBatch, row: int) -> int:
        part = part_until(batch, row)
        tensor = tensor_read_at(part.kv_length, len(self._info.layout.tensors))
        read = self._read_whole if len(self._pools) == 1 else self._read_ranks
        return checksum_of(read(tensor, part))

    def _read_whole(self, tensor: int, part: BatchSequence) -> Iterator[memoryview]:
        buffer = self._pools[0].buffer
        for run in self._info.layout.runs(tensor, part.block_ids, 0, part.kv_length):
            yield buffer[run.offset : run.offset + run.length]

    def _read_ranks(self, tensor: int, part: BatchSequence) -> Iterator[memoryview]:
        """Yield the heads of each token in order, each from one of the ranks that hold it."""
        spec = self._info.layout.tensors[tensor]
        held_by = [ranks_holding(head, spec.heads, len(self._pools)) for head in range(spec.heads)]
        turn = part.kv_length // len(self._info.layout.tensors)
        spans = self._info.layout.slots(part.block_ids, 0, part.kv_length)
        slots = itertools.chain.from_iterable(range(first, first + count) for first, count in spans)
        for position, slot in enumerate(slots):
            for head, ranks in enumerate(held_by):
                pool = self._pools[ranks[(position + turn) % len(ranks)]]
                layout = pool.layout
                at = layout.offsets[tensor] + slot * layout.tensors[tensor].token_bytes
                at += (head - layout.heads[tensor].start) * spec.head_bytes
                yield pool.buffer[at : at + spec.head_bytes]


@dataclass(frozen=True, slots=True)
class Computed:
    """Implements PendingStep: a step that is already computed."""

    output: StepOutput

    def collect(self) -> StepOutput:
        """Return the tokens."""
        return self.output


def kv_bytes(token_id: int, position: int, tensor: int, salt: int, head_bytes: int, heads: Heads) -> bytes:
    """Return the KV that instance `salt` writes for one token in these heads of one tensor, `head_bytes` per head."""
    word, parts = hash64(token_id << 40 ^ position << 16 ^ tensor, salt), []
    for head in range(heads.start, heads.end):
        own = (word + head * _HEAD_STEP) % (1 << 64)
        parts.append((own.to_bytes(8, "little") * -(-head_bytes // 8))[:head_bytes])
    return b"".join(parts)


def tensor_read_at(kv_length: int, num_tensors: int) -> int:
    """Return which tensor the next token is a checksum of: each in turn, so that a few tokens check them all."""
    return kv_length % num_tensors


def expected_tokens(
    config: FakeConfig,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    count: int,
    salts: Sequence[int],
    sequence: int = 0,
) -> tuple[int, ...]:
    """Return the first `count` output tokens of `prompt`, ignoring stop conditions.

    `salts[i]` is the salt of the instance that computed the KV of token i; the last one applies to all later tokens.
    So a prompt of 9 tokens that is handed off from salt 1 to salt 2 has salts [1] * 9 + [2].
    """
    tensors, token_ids = fake_tensors(config), list(prompt)
    for position in range(count):
        tensor = tensor_read_at(len(token_ids), len(tensors))
        size, heads = tensors[tensor].head_bytes, Heads(0, tensors[tensor].heads)
        checksum = checksum_of(
            kv_bytes(token_id, i, tensor, salts[min(i, len(salts) - 1)], size, heads)
            for i, token_id in enumerate(token_ids)
        )
        sample = SampleRow(0, params, sequence, position, banned_tokens(params, position, token_ids))
        token_id = choose_token(checksum, sample, config.vocab_size)
        assert token_id is not None, "a token is left to choose"
        token_ids.append(token_id)
    return tuple(token_ids[len(prompt) :])
