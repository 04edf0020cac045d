"""Device memory that steps need besides weights and pool: measured once with dummy tokens, before the pool is made.

largest step   a chunk at the end of the longest sequence, and all other sequences decoding; every row is sampled
decode step    all sequences decode: measures the memory that graphs keep, if graphs are used

These steps run on a pool with only the blocks they write; all earlier blocks of every sequence are block 0. So their
results are meaningless, but they use as much memory as real steps of these sizes. Log probabilities of prompt tokens
are computed in slices (engine/sampling/logprobs.py) and not included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from devices.interface import Device
from devices.liveness import in_a_line
from devices.out_of_memory import is_out_of_memory
from engine.attention import torch_paged, varlen
from engine.attention.interface import GraphBackend
from engine.decode_graphs import graph_shapes
from engine.interface import EngineInfo
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from telemetry.logs import EventLogger
from wire.errors import ConfigError
from wire.types import SamplingParams

_log = EventLogger("engine")

_DECODED_KEYS = max(torch_paged.MAX_KEYS, varlen.MAX_KEYS)
"""Total KV tokens of the decoding sequences: no attention backend gathers more at once, and some gather fewer."""
_STRIDE = 7919
"""Makes neighbouring dummy tokens differ, so that they are routed to experts much like the tokens of a text."""
_INT64 = 8
_HISTORY = (0,)
"""History over which a dummy sequence's penalties are counted."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Limits on a step: the prompt tokens and the sequences in it."""

    prompt_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that the pool leaves free for steps and for the graphs of decode steps."""

    step_bytes: int = 0
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of both."""
        return self.step_bytes + self.graph_bytes

    def describe(self) -> str:
        """Return the headroom as text for a log or an error, empty if it is zero."""
        if not self.total_bytes:
            return ""
        graphs = f", {self.graph_bytes / 2**20:.0f} MiB of it for graphs" if self.graph_bytes else ""
        return f"{self.total_bytes / 2**20:.0f} MiB left for steps{graphs}"


def measure_headroom(
    make_model: Callable[[], TorchModel], device: Device, largest: LargestStep, *, graph_rows: int = 0,
    graphs: GraphBackend | None = None,
) -> Headroom:  # fmt: skip
    """Run the largest steps, each on a model of its own with a pool of `num_blocks`, and return their peak memory.

    `graphs` is the attention backend where steps of up to `graph_rows` sequences are replayed. Raises ConfigError, with
    the numbers, if a step does not fit in addition to the weights; any other error is logged, and no memory is
    reserved.
    """
    try:
        step_bytes = _peak(make_model, device, lambda model: _run(model, largest_batch(model.info, largest)))
        graph_bytes = _graph_bytes(make_model, device, graph_rows, graphs) if graph_rows and graphs is not None else 0
    except Exception as error:
        if not is_out_of_memory(error):  # from a driver or the network: a real step will report it
            _log.warning("headroom_not_measured", device=device.name, reserved_bytes=0, error=in_a_line(error))
            return Headroom()
        raise ConfigError(
            f"the largest step (prompt tokens: {largest.prompt_tokens}, sequences: {largest.sequences}) does not fit "
            f"in addition to the weights on {device.name}: {device.memory().free} of {device.memory().total} bytes are "
            "free; lower --prefill-chunk-size or --max-num-seqs"
        ) from error
    return Headroom(step_bytes, graph_bytes)


def num_blocks(info: EngineInfo, largest: LargestStep, graph_rows: int) -> int:
    """Return the blocks of the smallest pool that the dummy steps can run on."""
    batches = largest_batch(info, largest), decode_batch(info, max(1, graph_rows))
    return 1 + max(max(part.block_ids) for batch in batches for part in batch.sequences)


def largest_batch(info: EngineInfo, largest: LargestStep) -> StepBatch:
    """Return the dummy step with the most tokens."""
    longest, size = info.max_model_len, info.layout.block_size
    count = min(largest.prompt_tokens, longest)
    start = longest - count
    written = range(1, 1 + -(-longest // size) - start // size)
    chunk = BatchSequence(start, count, (*(0,) * (start // size), *written))
    return _batch(info, [chunk, *_decoding(info, largest.sequences - 1, written.stop)])


def decode_batch(info: EngineInfo, sequences: int) -> StepBatch:
    """Return the dummy step in which all sequences decode."""
    return _batch(info, _decoding(info, sequences, 1))


def _decoding(info: EngineInfo, sequences: int, first: int) -> list[BatchSequence]:
    """Return sequences of one new token each that fill the blocks from `first` on; no two write the same slot."""
    longest, size = info.max_model_len, info.layout.block_size
    before = (max(1, min(longest, _DECODED_KEYS // max(1, sequences))) - 1) // size
    room = min(size, longest - before * size)
    return [
        BatchSequence(before * size + i % room, 1, (*(0,) * before, first + i // room)) for i in range(sequences)
    ]  # fmt: skip


def _batch(info: EngineInfo, parts: list[BatchSequence]) -> StepBatch:
    """Return a step of these sequences that samples the last row of each, with log probabilities.

    Each has a penalty, because that makes another copy of the logits, which exists until the tokens are chosen.
    """
    num_tokens = sum(part.count for part in parts)
    token_ids = tuple(place * _STRIDE % info.vocab_size for place in range(num_tokens))
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, max_tokens=1, seed=0, frequency_penalty=0.5)
    ends = accumulate(part.count for part in parts)
    return StepBatch(token_ids, tuple(parts), tuple(SampleRow(end - 1, params, 0, 0, history=_HISTORY) for end in ends))


def _run(model: TorchModel, batch: StepBatch) -> None:
    model.launch(batch).collect()


def _peak(make_model: Callable[[], TorchModel], device: Device, run_on: Callable[[TorchModel], None]) -> int:
    """Return the peak memory of a run besides weights and pool; the model and its pool are freed on return.

    A first run is not measured: memory that libraries allocate in their first call and keep counts as in use later.
    """
    pool_bytes = 0

    def run() -> None:
        nonlocal pool_bytes
        model = make_model()
        pool_bytes = model.memory.layout.total_bytes
        try:
            model.memory.tensor.zero_()  # type: ignore[attr-defined]  # a device pool: avoids NaN in steps
            run_on(model)
        finally:
            model.close()

    device.peak_bytes(run)
    return max(0, device.peak_bytes(run) - pool_bytes)


def _graph_bytes(
    make_model: Callable[[], TorchModel], device: Device, rows: int, backend: GraphBackend
) -> int:  # fmt: skip
    """Return the memory that graphs of steps of up to `rows` sequences keep.

    All share the logits and the tensors of the largest graph; each has its own inputs and attention buffers.
    """
    kept = 0

    def run(model: TorchModel) -> None:
        nonlocal kept
        info, logits = model.info, model.logits(decode_batch(model.info, rows))
        maximum = info.layout.num_blocks_for(info.max_model_len)
        own = sum(
            size * (4 + width) * _INT64 + backend.fixed_bytes(size, width)
            for size, width in graph_shapes(backend, rows, maximum, info.layout.block_size)
        )
        kept = own + logits.numel() * logits.element_size()

    return _peak(make_model, device, run) + kept
