"""The interface between engine and model: rows and sequences in, tokens and log probabilities out. Torch-free.

EngineCore --StepBatch--> Model.launch --> PendingStep.collect --StepOutput--> EngineCore

A step makes a SampleRow and a BatchSequence for every sequence. These classes are not frozen, because frozen objects
take four to seven times as long to make; even so, nothing changes their objects.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from devices.interface import Memory
from engine.interface import EngineInfo
from engine.token_counts import TokenCounts
from wire.errors import PdserveError
from wire.types import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class SampleRow:
    """Sample one token from the logits of flattened row `row`.

    The random number is a counter hash of (params.seed, sequence, position), independent of state and other rows.
    Tokens in `banned` cannot be chosen (stop ids before min_tokens, ends of bad words). `history` are the tokens before
    the sampled one, the first `prompt_length` of them the prompt's; it is the caller's list and must not be kept.
    `mask` has one bit per token, in little-endian 32-bit words, set if the grammar allows it. `candidates`: how many of
    the best tokens to return with their scores, for beam search. `counts` are the token counts of `history`, if there
    are penalties and the caller keeps counts.
    """

    row: int
    params: SamplingParams
    sequence: int
    position: int
    banned: tuple[int, ...] = ()
    history: Sequence[int] = ()
    prompt_length: int = 0
    mask: memoryview | None = None
    candidates: int = 0
    counts: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Compute log probabilities from row `row`: of `token_id`, a prompt's next token, and of the `wanted` ones.

    `wanted` is a number of best tokens, or the ids of tokens.
    """

    row: int
    token_id: int
    wanted: int | tuple[int, ...]


@dataclass(slots=True)
class BatchSequence:
    """One sequence's part of a step: its tokens [start, start + count), its blocks, its KV length after the step.

    `block_ids` is the caller's table, which grows after the step: it must not be kept.
    `prompt_length`: how many of its tokens count as its prompt; some RoPE types depend on that (rope_lengths.py).
    Tokens of one of the `spans`, [start, end) within the sequence, see each other whatever their order.
    """

    start: int
    count: int
    block_ids: Sequence[int]
    prompt_length: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def kv_length(self) -> int:
        """Tokens of KV after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class PoolingRows:
    """Sum the last hidden states (after the final norm) of flattened rows [row, row + count), one or more.

    With `each` the states are not summed, but returned one after another.
    """

    row: int
    count: int
    each: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Use `values` as the embeddings of flattened rows [row, row + count), in place of their tokens'.

    `values` are the bytes of [count, hidden_size] values in the model's dtype.
    """

    row: int
    count: int
    values: memoryview


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One flattened step: `token_ids` of all sequences one after another; which rows to sample, score and pool.

    `carried` are (row, sample): the token of this flattened row is the one sampled for that SampleRow of the previous
    step; `token_ids` has a placeholder. Only a model that runs ahead gets any. `embedded` are rows of images.
    `positions` has three numbers for each row, in time, height and width; None: each row has its index in the sequence.
    """

    token_ids: tuple[int, ...]
    sequences: tuple[BatchSequence, ...]
    samples: tuple[SampleRow, ...]
    scores: tuple[ScoreRow, ...] = ()
    pooling_rows: tuple[PoolingRows, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    embedded: tuple[EmbeddedRows, ...] = ()
    positions: "array[int] | None" = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of one row, best first, with their log probabilities after all processors: their scores.

    `described` has those of the raw logits, as for sampled tokens, if the row requests log probabilities.
    """

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    described: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's output: one entry per SampleRow in the first three fields, one per ScoreRow in `scores`.

    `logprobs` and `candidates` are empty if no row requested them, else None for rows that did not; a row with
    candidates has its log probabilities there. `failures` are (SampleRow's index, error) of rows for which no token
    could be chosen; their other entries are meaningless.
    `score_failure` is why `scores` are missing; it fails only prompts that requested them. `pooled` has a vector for
    each of the PoolingRows.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] = ()
    candidates: Sequence[Candidates | None] = ()
    scores: Sequence[TokenLogprobs] = ()
    failures: Sequence[tuple[int, PdserveError]] = ()
    score_failure: PdserveError | None = None
    pooled: Sequence[Sequence[float]] = ()


class PendingStep(Protocol):
    """A launched step."""

    def collect(self) -> StepOutput:
        """Wait for the step and return its output."""
        ...


class Model(Protocol):
    """Weights, KV pools, attention and sampler of all ranks. `info.layout` is of the whole model, as on one rank."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed, so that the next step may be launched before `collect`.

        Steps and copies of blocks are computed in the order of their launches.
        """
        ...

    @property
    def memories(self) -> Sequence[Memory]:
        """The pool of each rank; all have the same blocks."""
        ...

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Start one step; if it raises, no work of it is running any more.

        `layer_done(layer)` is called when each layer's KV is written; where the model runs ahead, when the write is
        launched: the pool then has an event for its completion (devices/device_pool.py).
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor (copy on write). It is done on return: either block may then be written."""
        ...

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each block into its slot of the swap area: memory outside the pool, made when a slot is first used."""
        ...

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each saved slot into its block."""
        ...

    def close(self) -> None:
        """Free the pool; no step may follow. Idempotent."""
        ...
