"""What a model is to the engine: one step's rows and sequences in, tokens and likelihoods out. Torch-free.

EngineCore --StepBatch--> Model.launch --> Pending.collect --StepOutput--> EngineCore

A step makes a SampleRow and a BatchSequence for every sequence, so these are not frozen: that takes four to seven times
as long to make. Nobody changes them.
"""

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

    The random number is a counter hash of (params.seed, sequence, position): no state, no neighbours. Tokens in
    `banned` cannot be chosen (stop ids before min_tokens, ends of bad words). `history` are the tokens before the one
    to choose, the first `prompt_length` of them the prompt's; it is the caller's list and must not be kept. `mask` has
    one bit a token, little-endian 32-bit words, set for those that the grammar allows. `candidates`: so many of the
    best tokens are wanted with their scores, as beam search ranks them. `counts` are those of `history`, where
    penalties are asked for and somebody keeps them.
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
    """Tell how likely `token_id`, a prompt's next token, is by the logits of row `row`, beside the `top` best."""

    row: int
    token_id: int
    top: int


@dataclass(slots=True)
class BatchSequence:
    """One sequence's part of a step: tokens [start, start + count) of it, KV length after the step, its blocks.

    `block_ids` is the caller's table, which grows after the step: it must not be kept.
    `prompt_length`: how many of its tokens count as its prompt's; some rotations depend on that (rope_lengths.py).
    """

    start: int
    count: int
    block_ids: Sequence[int]
    prompt_length: int = 0

    @property
    def kv_length(self) -> int:
        """Tokens of KV after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Add up the last hidden states (after the final norm) of flattened rows [row, row + count), one or more."""

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One flattened step: `token_ids` of all sequences one after another; which rows to sample, score and pool.

    `carried` are (row, sample): the token of this flattened row is what that SampleRow of the step launched before
    chooses, and is not in `token_ids`. Only a model that runs ahead is given any.
    """

    token_ids: tuple[int, ...]
    sequences: tuple[BatchSequence, ...]
    samples: tuple[SampleRow, ...]
    scores: tuple[ScoreRow, ...] = ()
    pools: tuple[PoolRows, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of one row, best first, with their log probabilities after all processors."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step made: one entry for each SampleRow in the first three, one for each ScoreRow in `scores`.

    `logprobs` and `candidates` are empty when no row asked, else None where a row did not. `failures` are (SampleRow's
    index, why) of rows for which no token could be chosen; their other entries mean nothing. `score_failure` is why
    `scores` are missing, which concerns those alone who asked. `pooled` has a vector for each of the PoolRows.
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
        """Wait and return what the step made."""
        ...


class Model(Protocol):
    """Weights, KV pools, attention and sampler of all ranks. `info.layout` is of the whole model, as if of one rank."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed, so that the next may be launched before its collect.

        Steps are computed in the order of their launches, as are copies of blocks among them.
        """
        ...

    @property
    def memories(self) -> Sequence[Memory]:
        """The pool of each rank; all have the same blocks."""
        ...

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Start one step; whoever raises leaves nothing of it running.

        `layer_done(layer)` is called as each layer's KV is written; ahead of that where the model runs ahead: the pool
        then knows when it is (devices/device_pool.py).
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor (copy on write). It is done on return: others may write either block then."""
        ...

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each block into its slot of the swap area: memory outside the pool, made when a slot is first used."""
        ...

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot, saved before, into its block."""
        ...

    def close(self) -> None:
        """Give the pool back; no step may follow. Idempotent."""
        ...
