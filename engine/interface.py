"""The engine as its instance sees it. Torch-free; the interface between engine and model is in step.py.

    instance/engine_loop  --calls-->  Engine (engine/core.py: batcher + blocks + sequences, ints only)
                                        |  launch(StepBatch) -> PendingStep.collect()
                                        v
                                      Model (engine/torch_model.py: weights, pool, attention, sampler)

One thread calls the engine; only `check`, `load` and `blocks` (with its own lock) may be used from others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from devices.interface import Memory
from engine.grammar.interface import Grammar
from engine.pooling_settings import PoolingSettings
from engine.prefix import BlockName, PrefixChain
from engine.rope_lengths import RopeLengths
from wire.description import ModelIdentity
from wire.kv_layout import ITEM_BYTES, PoolLayout
from wire.load import LoadSnapshot
from wire.types import PromptLogprobs, PromptState, TokenOutput

Embeddings = bytes | memoryview
"""The embeddings of one image: [count, hidden_size] values of the engine's dtype, row by row, one row per token."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of the loaded model and its pool.

    `pooling` is how hidden states (of `hidden_size`) become a vector, None if this model does not pool. A model
    without `generates` has no output layer and returns only vectors. With `takes_images` a prompt may have images; with
    `rope_sections` their tokens are rotated by three positions (grid_rotary.py), and with `images_attend_within` the
    tokens of an image see each other both ways (whole_images.py).
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
    takes_images: bool = False
    rope_sections: tuple[int, ...] = ()
    images_attend_within: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's embedding."""
        return self.hidden_size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a held prompt: their KV is ready after this step. `block_ids`: the prompt's table so far.

    The step computes them, except a prompt's first tokens if the prefix cache had their KV.
    """

    prompt_id: str
    start: int
    end: int
    block_ids: tuple[int, ...]


OnLayer = Callable[[int, Sequence[Chunk]], None]
"""Called on the engine thread when a layer's KV of the step's chunks is written, layer numbers ascending."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A held prompt has its first tokens: `state.outputs` has one token per sequence.

    `finished`: these tokens finished every sequence; the engine has freed the blocks and nothing is held. The KV of
    `cached_tokens` prompt tokens was in the prefix cache and was not computed; that of `written_tokens` was added.
    """

    state: PromptState
    finished: bool
    seconds: float
    cached_tokens: int = 0
    written_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A finished pooling prompt with its values: those of its `Pooling.kind`. `seconds` is the time since its start."""

    prompt_id: str
    values: tuple[float, ...]
    seconds: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced. `failed`: (prompt_id, error) of prompts that were removed and whose blocks are free.

    `computed`: (prompt_id, seconds since its start, cached tokens, tokens added to the cache) of each prompt that
    generates here and is computed.
    `progressed`: prompts that advanced without a token to emit yet (beam search).
    `interrupted`: (prompt_id, times swapped out, times dropped to token ids) of prompts preempted between two tokens.
    `num_tokens`: prompt and output tokens that the model computed. `num_served`: prompt tokens that it computed and
    output tokens that it sampled, without those of probes. `seconds`: from the step's selection, or the end of
    the previous step if it was launched behind that one, to its own end; the times of two steps never overlap.
    """

    tokens: tuple[TokenOutput, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    failed: tuple[tuple[str, Exception], ...] = ()
    first_steps: tuple[tuple[str, float], ...] = ()
    computed: tuple[tuple[str, float, int, int], ...] = ()
    seconds: float = 0.0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    progressed: tuple[str, ...] = ()
    interrupted: tuple[tuple[str, int, int], ...] = ()
    num_tokens: int = 0
    num_served: int = 0


class Blocks(Protocol):
    """Block accounting; thread-safe. `engine/kv/blocks.py` is the implementation."""

    num_total: int

    @property
    def num_used(self) -> int:
        """Blocks held by a sequence or a ticket, including those of probes."""
        ...

    @property
    def num_probe(self) -> int:
        """Blocks held by probes."""
        ...

    def chain(self, state: PromptState) -> PrefixChain:
        """Return the names of a prompt's blocks; a chain without names for a probe, or where nothing is cached."""
        ...

    def take(self, num_blocks: int, prefix: Sequence[BlockName], *, probe: bool = False) -> tuple[tuple[int, ...], int]:
        """Allocate cached blocks of a leading part of `prefix` (read-only) first; also return the number of these."""
        ...

    def allocate(self, num_blocks: int, *, probe: bool = False) -> tuple[int, ...]:
        """Take `num_blocks` free blocks with one reference each. Raises NoCapacity, or NeverFits."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each."""
        ...


class Engine(Protocol):
    """Continuous batching over one model and one pool."""

    arriving: Callable[[], Sequence[float]]
    """Returns the `gap_limit_s` of each prompt whose KV is being received, which long chunks would delay. Set by the
    instance."""

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

        `hold`: only the prompt has to fit, because its outputs are generated elsewhere.
        """
        ...

    def add(
        self,
        state: PromptState,
        *,
        hold: bool = False,
        grammar: Grammar | None = None,
        embeddings: Sequence[Embeddings] = (),
    ) -> None:
        """Queue a prompt whose KV is computed here; one with outputs is resumed. `grammar` constrains its outputs.

        `hold`: stop after the first token of each sequence and keep the prompt's blocks until `release`.
        `embeddings`: one for each of `state.images`, whose `data` the engine ignores.
        """
        ...

    def admit(self, state: PromptState, block_ids: Sequence[int], grammar: Grammar | None = None) -> None:
        """Start a prompt; `block_ids` hold the KV of all its prompt tokens. The engine takes over the references.

        `state.outputs` has at least one token per sequence. The sequences share the blocks, copy on write. Finished
        sequences (see engine/finish.py) are not started.
        """
        ...

    def cancel(self, prompt_id: str, sequence: int | None = None) -> tuple[TokenOutput, ...]:
        """End a prompt or one of its sequences; return final outputs (token_id None, finish CANCELLED). Idempotent.

        Its blocks are free on return, except those that a launched step writes: they are freed when that step ends.
        """
        ...

    def release(self, prompt_id: str) -> None:
        """Free a held prompt's blocks. Idempotent."""
        ...

    def has_work(self) -> bool:
        """Return whether `step` would compute or collect anything."""
        ...

    def step(self, on_layer: OnLayer | None = None) -> StepResult:
        """Compute one batch. An error of one prompt fails only that prompt (`failed`); other errors are raised."""
        ...

    def load(self) -> LoadSnapshot:
        """Return the current load of engine and pool; the figures of other parts are 0. Any thread."""
        ...

    def close(self) -> None:
        """Free the pool; no other call may follow. Idempotent."""
        ...
