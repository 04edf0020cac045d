"""The Engine over an encoder: whole prompts, one batch per step. It keeps no KV and does not generate text."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import nullcontext

from devices.host_pool import HostPool
from devices.interface import Memory
from engine.grammar.interface import Grammar
from engine.interface import Embeddings, EngineInfo, OnLayer, PooledPrompt, StepResult
from engine.kv.blocks import BlockPool
from engine.pooling.encoder import Encoder
from engine.pooling.vectors import check_kind, check_numbers, check_one_answer, check_sizes
from engine.watched import Guard
from telemetry.logs import EventLogger
from wire.description import ModelIdentity
from wire.errors import InternalError, InvalidRequest, PromptTooLong
from wire.kv_layout import KvTensor, PoolLayout
from wire.load import LoadSnapshot
from wire.types import FinishReason, PromptState, TokenOutput

_log = EventLogger("engine")


class EncoderCore:
    """Implements `Engine`. Its pool is never used: it exists for code that counts blocks and opens transports."""

    def __init__(
        self, encoder: Encoder, identity: ModelIdentity, *, block_size: int, max_num_seqs: int,
        max_num_batched_tokens: int, clock: Callable[[], float] = time.monotonic, guard: Guard = nullcontext,
    ) -> None:  # fmt: skip
        """Each batch is computed in a context made by `guard`."""
        tensor = KvTensor(0, "k", 1, 1, "float32")
        blocks = max_num_seqs * -(-encoder.info.max_length // block_size)
        layout = PoolLayout((tensor, KvTensor(0, "v", 1, 1, "float32")), num_blocks=blocks, block_size=block_size)
        self._encoder = encoder
        self._info = EngineInfo(
            identity,
            encoder.info.max_length,
            encoder.info.vocab_size,
            encoder.info.dtype,
            encoder.info.device,
            layout,
            (),
        )
        self._memory = HostPool(layout)
        self._blocks = BlockPool(blocks)
        self._max_prompts, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self._clock, self._guard = clock, guard
        self.arriving: Callable[[], Many[float]] = lambda: ()
        self._waiting: deque[PromptState] = deque()

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded model."""
        return self._info

    @property
    def memories(self) -> Many[Memory]:
        """The unused pool."""
        return (self._memory,)

    @property
    def blocks(self) -> BlockPool:
        """The unused pool's accounting."""
        return self._blocks

    def check(self, state: PromptState, *, hold: bool = False) -> None:
        """Raise InvalidRequest or PromptTooLong if this model can never answer `state`. Any thread."""
        tasks, name, longest = self._encoder.info.tasks, self._info.model.name, self._info.max_model_len
        if state.pooling is None or hold:
            raise InvalidRequest(f"{name} supports {' and '.join(tasks)}, and generates no text", "model")
        check_kind(state.pooling.kind, tasks, name)
        check_one_answer(state.params)
        if not 1 <= len(state.token_ids) <= longest:
            raise PromptTooLong(
                f"the text has {len(state.token_ids)} tokens, but the model allows 1 to {longest}", "input"
            )
        bad = next((token for token in state.token_ids if not 0 <= token < self._info.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary [0, {self._info.vocab_size})", "input")
        check_sizes(state.pooling, len(state.token_ids), self._encoder.info.width)

    def add(
        self,
        state: PromptState,
        *,
        hold: bool = False,
        grammar: Grammar | None = None,
        embeddings: Many[Embeddings] = (),
    ) -> None:
        """Queue a text. Raises as `check` does."""
        self.check(state, hold=hold)
        self._waiting.append(state)

    def admit(self, state: PromptState, block_ids: Many[int], grammar: Grammar | None = None) -> None:
        """Refuse: prompts are never handed off to an encoder."""
        self.check(state, hold=True)

    def cancel(self, prompt_id: str, sequence: int | None = None) -> tuple[TokenOutput, ...]:
        """Remove a waiting text; return its final output. Idempotent."""
        waiting = [state for state in self._waiting if state.prompt_id == prompt_id]
        for state in waiting:
            self._waiting.remove(state)
        return tuple(TokenOutput(state.prompt_id, 0, 0, None, FinishReason.CANCELLED) for state in waiting)

    def release(self, prompt_id: str) -> None:
        """Do nothing: prompts are never held."""

    def has_work(self) -> bool:
        """Return whether a text is waiting."""
        return bool(self._waiting)

    def step(self, on_layer: OnLayer | None = None) -> StepResult:
        """Compute the next batch. An error fails all its texts; a result with NaN or infinite values, only its own."""
        started, states = self._clock(), self._take()
        if not states:
            return StepResult()
        try:
            with self._guard():
                answers = self._encoder.run(states)
        except Exception as error:  # noqa: BLE001 - the step's outermost frame: answered in `failed`
            return StepResult(failed=tuple((state.prompt_id, self._step_failure(state, error)) for state in states))
        seconds = self._clock() - started
        pooled: list[PooledPrompt] = []
        failed: list[tuple[str, Exception]] = []
        for state, values in zip(states, answers, strict=True):
            try:
                check_numbers(values)
                pooled.append(PooledPrompt(state.prompt_id, values, seconds))
            except InternalError as error:
                failed.append((state.prompt_id, self._step_failure(state, error)))
        num_tokens = sum(len(state.token_ids) for state in states)
        return StepResult(pooled=tuple(pooled), failed=tuple(failed), seconds=seconds, num_tokens=num_tokens)

    def load(self) -> LoadSnapshot:
        """Return the current load; the pool is never used. Any thread."""
        waiting = self._waiting.copy()
        tokens = sum(len(state.token_ids) for state in waiting)
        return LoadSnapshot(blocks_total=self._blocks.num_total, uncomputed_tokens=tokens)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()

    def _take(self) -> list[PromptState]:
        """Return the next texts whose padded batch is within the limits, at least one."""
        taken: list[PromptState] = []
        longest = 0
        while self._waiting and len(taken) < self._max_prompts:
            longest = max(longest, len(self._waiting[0].token_ids))
            if taken and longest * (len(taken) + 1) > self._max_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _step_failure(self, state: PromptState, error: Exception) -> InternalError:
        _log.error("prompt_failed", error, prompt_id=state.prompt_id, request_id=state.request_id)
        failure = InternalError(f"the step of this prompt failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
