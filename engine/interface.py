"""What an engine is to the instance that hosts it. Torch-free; what a model is to the engine stands in step.py.

    instance/engine_loop  --calls-->  Engine (engine/core.py: batcher + blocks + sequences, ints only)
                                        |  launch(StepBatch) -> Pending.collect()
                                        v
                                      Model (engine/torch_model.py: weights, pool, attention, sampler | engine/fake.py)

One thread calls the engine; only `blocks` (its own lock) may be used from others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from devices.interface import Memory
from engine.grammar.interface import Grammar
from engine.pooling_settings import PoolingSettings
from engine.prefix import BlockName, PrefixChain
from engine.rope_lengths import RopeLengths
from wire.kv_layout import PoolLayout
from wire.types import (
    ModelIdentity,
    PromptLogprobs,
    PromptState,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the loaded model and its pool are.

    `pooling` is how its hidden states, of `hidden_size`, become a vector, None where they never do. One that does not
    `generate` has no output layer and answers with vectors alone.
    """

    model: ModelIdentity
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    layout: PoolLayout
    eos_token_ids: tuple[int, ...]
    rope: RopeLengths | None = None
    pooling: PoolingSettings | None = None
    hidden_size: int = 0
    generates: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a held prompt whose KV is there after this step; `block_ids` is its table so far.

    The step computes them, but for the first ones of a prompt where its KV was there already.
    """

    prompt_id: str
    start: int
    end: int
    block_ids: tuple[int, ...]


OnLayer = Callable[[int, Sequence[Chunk]], None]
"""Called on the engine thread when a layer's KV of the step's chunks is written, layer numbers ascending."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A held prompt has its first tokens. `state.outputs` has one token a sequence.

    `finished`: those tokens ended every sequence; the engine has freed the blocks and nothing is held. The KV of
    `cached_tokens` of the prompt was there already and was not computed.
    """

    state: PromptState
    finished: bool
    seconds: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt with pooling is answered and gone: its vector, or its score alone. `seconds` since it was begun."""

    prompt_id: str
    values: tuple[float, ...]
    seconds: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made. `failed` holds (prompt_id, error): their blocks are free, nothing of them is left.

    `computed` tells of prompts that generate here, once they are computed, in how many seconds since they were begun,
    and how many of their tokens needed no computing.
    `progressed` are prompts that came further without a token that could be told (beam search). `interrupted` tells of
    prompts put aside between two of their tokens how often they were by now: as copies, and as token ids alone.
    `num_tokens` went through the model, of prompts and of outputs. `seconds` are those from the step's selection, or
    from the end of the step before where it was launched behind that, to its own end: they never overlap.
    """

    tokens: tuple[TokenOutput, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    failed: tuple[tuple[str, Exception], ...] = ()
    first_steps: tuple[tuple[str, float], ...] = ()
    computed: tuple[tuple[str, float, int], ...] = ()
    seconds: float = 0.0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    progressed: tuple[str, ...] = ()
    interrupted: tuple[tuple[str, int, int], ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Figures for LoadSnapshot."""

    running: int
    waiting: int
    uncomputed_tokens: int
    held_prompts: int
    preemptions: int
    blocks_swapped: int = 0


class Blocks(Protocol):
    """Block accounting; thread-safe. `engine/kv/blocks.py` is the implementation."""

    num_total: int

    @property
    def num_used(self) -> int:
        """Blocks held by a sequence or a ticket, those of probes included."""
        ...

    @property
    def num_probe(self) -> int:
        """Blocks held by probes."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks kept only because they may be wanted again."""
        ...

    @property
    def tokens_sought(self) -> int:
        """Tokens that prompts looked for among the cached ones since the start."""
        ...

    @property
    def tokens_found(self) -> int:
        """Those of them that were there."""
        ...

    def chain(self, state: PromptState) -> PrefixChain:
        """Return the names of a prompt's blocks; none where nothing is cached, or for a probe."""
        ...

    def take(self, num_blocks: int, prefix: Sequence[BlockName], *, probe: bool = False) -> tuple[tuple[int, ...], int]:
        """As `allocate`, with those that hold a leading part of `prefix` first, not to be written; say how many."""
        ...

    def allocate(self, num_blocks: int, *, probe: bool = False) -> tuple[int, ...]:
        """Take `num_blocks` free blocks with one reference each. Raises NoCapacity, or NeverFits past the pool."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each."""
        ...


class Engine(Protocol):
    """A continuous batch over one model and one pool."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def memories(self) -> Sequence[Memory]:
        """The pool of each rank; all have the same blocks."""
        ...

    @property
    def blocks(self) -> Blocks: ...

    def check(self, state: PromptState, *, hold: bool = False) -> None:
        """Raise PromptTooLong, NeverFits or InvalidRequest if this engine can never run `state`. Any thread.

        `hold`: only the prompt has to fit, its outputs are generated elsewhere.
        """
        ...

    def add(self, state: PromptState, *, hold: bool = False, grammar: Grammar | None = None) -> None:
        """Queue a prompt whose KV is computed here; with outputs so far it is resumed. `grammar` binds its outputs.

        `hold`: stop after the first token of each sequence and keep the prompt's blocks until `release`.
        """
        ...

    def admit(self, state: PromptState, block_ids: Sequence[int], grammar: Grammar | None = None) -> None:
        """Start a prompt whose KV of all its prompt tokens lies in `block_ids`; the engine takes their references.

        `state.outputs` has at least one token for each sequence. The prompt's sequences share the blocks, copy on
        write. Finished sequences (see engine/finish.py) are not started.
        """
        ...

    def cancel(self, prompt_id: str, sequence: int | None = None) -> tuple[TokenOutput, ...]:
        """End a prompt or one of its sequences; return their endings (token_id None, finish CANCELLED). Idempotent.

        Its blocks are free on return, but for those that a launched step writes: they are with the end of that step.
        """
        ...

    def release(self, prompt_id: str) -> None:
        """Free what a held prompt holds. Idempotent."""
        ...

    def has_work(self) -> bool:
        """Whether `step` would compute something, or take what is computed."""
        ...

    def step(self, on_layer: OnLayer | None = None) -> StepResult:
        """Compute one batch. An error of one prompt ends that prompt (`failed`); others raise."""
        ...

    def load(self) -> EngineLoad:
        """Return the figures of now. Any thread."""
        ...

    def close(self) -> None:
        """Give the pool back; nothing may follow. Idempotent."""
        ...
