"""What steps take of a device beside weights and pool: measured once, with dummy tokens, before the pool is made.

largest step   a chunk at the end of the longest sequence, and all other sequences decoding; every row is sampled
decode step    all sequences decode: what graphs keep for themselves, where there are any

They run on a pool of one block, which all block tables name: what they compute means nothing, what they take is what
steps of these sizes take. Likelihoods of a prompt's tokens are worked on in slices (engine/logprobs.py) and not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from devices.interface import Device
from devices.out_of_memory import is_out_of_memory
from devices.touch import in_a_line
from engine.decode_graphs import graph_sizes
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from telemetry.logs import EventLogger
from wire.errors import ConfigError
from wire.types import SamplingParams

_log = EventLogger("engine")

_DECODED_KEYS = 1 << 16
"""Tokens of KV of all decoding sequences together; attention by torch gathers so many at once (torch_paged.py)."""
_STRIDE = 7919
"""Neighbours in a dummy step differ, so that experts share its tokens as they do those of a text."""
_INT64 = 8


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What bounds a step: tokens of prompts in it, and sequences."""

    prompt_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that a pool leaves to steps, and to the graphs of steps that decode."""

    step_bytes: int = 0
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.step_bytes + self.graph_bytes

    def describe(self) -> str:
        """Return it for people, empty where it is nothing."""
        if not self.total_bytes:
            return ""
        graphs = f", {self.graph_bytes / 2**20:.0f} MiB of it to graphs" if self.graph_bytes else ""
        return f"{self.total_bytes / 2**20:.0f} MiB left to steps{graphs}"


def measure_headroom(
    model: TorchModel, device: Device, largest: LargestStep, *, graph_rows: int, table_width: Callable[[int, int], int]
) -> Headroom:  # fmt: skip
    """Run the largest steps of `model`, whose pool has one block, and return what they took at most.

    `table_width` is the attention backend's where there are graphs. Raises ConfigError, with the numbers, where a step
    does not fit beside the weights; whatever else fails is told in the log, and nothing is kept free for it.
    """
    try:
        step_bytes = device.peak_bytes(lambda: _run(model, largest_batch(model, largest)))
        graph_bytes = _graph_bytes(model, device, graph_rows, table_width) if graph_rows else 0
    except Exception as error:
        if not is_out_of_memory(error):  # a driver's or the network's: a prompt's own step will say it
            _log.warning("headroom_not_measured", device=device.name, error=in_a_line(error))
            return Headroom()
        raise ConfigError(
            f"a step of {largest.prompt_tokens} tokens of prompts and {largest.sequences} sequences does not fit "
            f"beside the weights on {device.name}, of whose {device.memory().total} bytes {device.memory().free} are "
            "free: lower --prefill-chunk-size or --max-num-seqs"
        ) from error
    return Headroom(step_bytes, graph_bytes)


def largest_batch(model: TorchModel, largest: LargestStep) -> StepBatch:
    """Return the dummy step with the most tokens."""
    longest = model.info.max_model_len
    chunk = min(largest.prompt_tokens, longest)
    return _batch(model, [(longest - chunk, chunk), *_decoding(model, largest.sequences - 1)])


def decode_batch(model: TorchModel, sequences: int) -> StepBatch:
    """Return the dummy step in which all sequences decode."""
    return _batch(model, _decoding(model, sequences))


def _decoding(model: TorchModel, sequences: int) -> list[tuple[int, int]]:
    length = max(1, min(model.info.max_model_len, _DECODED_KEYS // max(1, sequences)))
    return [(length - 1, 1)] * sequences


def _batch(model: TorchModel, parts: list[tuple[int, int]]) -> StepBatch:
    """Return a step of (start, count) for each sequence, all in block 0; the last row of each is sampled and scored."""
    info = model.info
    num_tokens = sum(count for _, count in parts)
    token_ids = tuple(place * _STRIDE % info.vocab_size for place in range(num_tokens))
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, max_tokens=1, seed=0)
    samples, sequences, row = [], [], 0
    for start, count in parts:
        row += count
        samples.append(SampleRow(row - 1, params, 0, 0))
        sequences.append(BatchSequence(start, count, (0,) * info.layout.num_blocks_for(start + count)))
    return StepBatch(token_ids, tuple(sequences), tuple(samples))


def _run(model: TorchModel, batch: StepBatch) -> None:
    model.launch(batch).collect()


def _graph_bytes(
    model: TorchModel, device: Device, rows: int, table_width: Callable[[int, int], int]
) -> int:  # fmt: skip
    """Return what graphs of steps up to `rows` sequences keep: the largest's tensors, shared, and inputs and logits."""
    logits_bytes = 0

    def run() -> None:
        nonlocal logits_bytes
        logits = model.logits(decode_batch(model, rows))
        logits_bytes = logits.numel() * logits.element_size()

    info = model.info
    most = info.layout.num_blocks_for(info.max_model_len)
    widths = {table_width(min(most, 1 << power), most) for power in range(most.bit_length() + 1)}
    inputs = sum(size * (4 + width) * _INT64 for size in graph_sizes(rows) for width in widths)
    return device.peak_bytes(run) + logits_bytes + inputs
