"""The engine: continuous batching over one model and one pool of blocks. Integers only, no torch.

A step has four parts: select (batch_state.py), launch and collect (the model), advance (advance.py). With a model that
runs ahead, step k+1 is launched before step k is collected (ahead.py): the device computes while the host advances.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

from devices.interface import Memory
from engine.advance import Advance
from engine.ahead import lets_follow
from engine.assembly import LayerAnnouncer, batch_of, samples_of
from engine.batch_state import BatchState, Selection
from engine.batcher import BatchLimits, Streams, paced
from engine.grammar.interface import Grammar
from engine.grid_positions import GridPositions
from engine.interface import Embeddings, EngineInfo, OnLayer, StepResult
from engine.kv.blocks import BlockPool
from engine.kv.swap import SwapArea
from engine.launched import LaunchedStep, written_blocks
from engine.masks import fill_masks
from engine.outcome import StepOutcome
from engine.pooling.collected import resolve
from engine.prefix import why_no_names
from engine.prompt import Prompt, ScheduledTokens
from engine.prompt_images import PromptImages
from engine.requirements import check_begun, check_runnable
from engine.step import Model
from engine.step_costs import StepCosts
from engine.step_reader import read_output
from engine.whole_images import spans_of
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest
from wire.load import LoadSnapshot
from wire.types import PromptState, TokenOutput

_log = EventLogger("engine")


class EngineCore:
    """The `Engine` over any `Model`. One thread calls it; `check`, `load` and `blocks` may be used from any thread."""

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_size: int,
        prefix_caching: bool = True,
        reuse_decoded: bool = True,
        swap_bytes: int = 0,
        gap_limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix_caching`: keep freed KV for reuse, where blocks have names at all (prefix.py).

        `reuse_decoded`: keep the KV of outputs too.
        `swap_bytes`: memory limit for copies of preempted sequences' blocks. `gap_limit_s`: the limit for
        prompts that set none (batcher.paced).
        """
        self._model = model
        self._limits = BatchLimits(max_num_seqs, max_num_batched_tokens, prefill_chunk_size)
        self._gap_limit_s = gap_limit_s
        self.arriving: Callable[[], Many[float]] = lambda: ()
        self._costs = StepCosts()
        self._clock = clock
        layout = model.info.layout
        caches = prefix_caching and why_no_names(layout.block_size) is None
        self._blocks = BlockPool(
            layout.num_blocks, cached_block_size=layout.block_size if caches else None,
            root=f"{model.info.model.weights_digest} {model.info.dtype}", rope=model.info.rope,
            reuse_decoded=reuse_decoded,
        )  # fmt: skip
        self._batch = BatchState(model, self._blocks, SwapArea(model, swap_bytes), self._limits)
        self._advance = Advance(model.info, self._batch, self._blocks, clock)
        self._launched: deque[LaunchedStep] = deque()
        self._accepted = 0

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded model and its pool."""
        return self._model.info

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched before the previous one is collected; never if RoPE may recompute KV."""
        return self._model.runs_ahead and self._model.info.rope is None

    @property
    def memories(self) -> Many[Memory]:
        """The pool of each rank."""
        return self._model.memories

    @property
    def blocks(self) -> BlockPool:
        """The pool's accounting."""
        return self._blocks

    def check(self, state: PromptState, *, hold: bool = False) -> None:
        """Raise PromptTooLong, NeverFits or InvalidRequest if this engine can never run `state`. Any thread."""
        check_runnable(state, self.info, max_num_seqs=self._limits.max_num_seqs, prompt_only=hold)

    def add(
        self,
        state: PromptState,
        *,
        hold: bool = False,
        grammar: Grammar | None = None,
        embeddings: Many[Embeddings] = (),
    ) -> None:
        """Queue a prompt whose KV is computed here. Raises as `check` does; with `hold`, only the prompt has to fit.

        Raises InvalidGrammar if `grammar` does not allow the outputs so far, InternalError for embeddings that are not
        those of the prompt's images.
        """
        self.check(state, hold=hold)
        prompt = self._accept(state, hold=hold, grammar=grammar)
        if state.images or embeddings:
            prompt.images = PromptImages(state.images, embeddings, self.info.row_bytes)
        self._batch.queue(prompt)

    def admit(self, state: PromptState, block_ids: Many[int], grammar: Grammar | None = None) -> None:
        """Start a prompt whose KV is in `block_ids`. If this raises (as `check` does), the caller keeps the blocks."""
        layout = self.info.layout
        wanted = layout.num_blocks_for(len(state.token_ids))
        if len(block_ids) < wanted:
            raise InvalidRequest(
                f"the number of blocks is {len(block_ids)}, but the prompt's tokens need at least {wanted}"
            )
        check_begun(state)
        prompt = self._accept(state, hold=False, grammar=grammar)
        if not prompt.ended:
            self.check(state)
            prompt.admitted_at = self._clock()
        prompt.receive(block_ids[:wanted], self._blocks)
        self._blocks.release(block_ids[wanted:])
        if not prompt.ended:
            self._batch.running[state.prompt_id] = prompt

    def cancel(self, prompt_id: str, sequence: int | None = None) -> tuple[TokenOutput, ...]:
        """End a prompt or one of its sequences; return their final outputs. Idempotent.

        The blocks are free on return, except those that a launched step writes: they are freed when that step is
        collected.
        """
        prompt = self._batch.find(prompt_id)
        if prompt is None:
            return ()
        chosen = range(len(prompt.sequences)) if sequence is None else (sequence,)
        live = [i for i in chosen if 0 <= i < len(prompt.sequences) and prompt.sequences[i].finish is None]
        outputs = tuple(prompt.cancel(i, self._blocks) for i in live)
        if prompt.ended:
            self._batch.remove(prompt)
        return outputs

    def release(self, prompt_id: str) -> None:
        """Free a held prompt's blocks. Idempotent."""
        prompt = self._batch.held.get(prompt_id)
        if prompt is not None:
            self._batch.remove(prompt)

    def has_work(self) -> bool:
        """Return whether `step` would compute or collect. False while all running prompts wait for blocks in use."""
        return bool(self._launched) or self._batch.has_work()

    def load(self) -> LoadSnapshot:
        """Return the current load of engine and pool. Any thread."""
        state, blocks, streams = self._batch, self.blocks, self._streams()
        return LoadSnapshot(
            blocks_total=blocks.num_total,
            blocks_used=blocks.num_used,
            blocks_probe=blocks.num_probe,
            blocks_cached=blocks.num_cached,
            prefix_tokens_sought=blocks.tokens_queried,
            prefix_tokens_found=blocks.tokens_found,
            prefix_tokens_found_decoded=blocks.tokens_found_decoded,
            running=sum(not prompt.state.probe for prompt in state.running.copy().values()),
            waiting=len(state.waiting),
            uncomputed_tokens=sum(prompt.uncomputed_tokens for prompt in state.prompts()),
            held_prompts=len(state.held),
            preemptions=state.preemptions,
            blocks_swapped=state.swap.num_used,
            decoding=streams.num,
            gap_limit_s=streams.gap_limit_s,
            step_base_s=self._costs.now.base_s,
            step_sequence_s=self._costs.now.sequence_s,
            step_token_s=self._costs.now.token_s,
        )

    def close(self) -> None:
        """Free the pool; no other call may follow. Idempotent."""
        while self._launched:  # the blocks it writes must not be freed before it ends
            try:
                self._launched.popleft().pending.collect()
            except Exception as error:  # noqa: BLE001 - no caller is left: logged
                _log.error("step_failed_at_close", error)
        self._model.close()

    def step(self, on_layer: OnLayer | None = None) -> StepResult:
        """Compute one batch. An error fails only the prompts it belongs to (`failed`); the others continue.

        Returns one step's result. Where the model runs ahead, the next step is launched before that one is collected.
        """
        started = self._clock()
        outcome = StepOutcome()
        costs = self._costs
        self._batch.limits = paced(self._limits, costs.now, self._streams(), costs.longest_chunk)
        if not self._launched:
            self._launch(self._batch.select(started), started, on_layer, outcome)
        if self._launched:
            if self.runs_ahead and lets_follow(self._launched[0].schedule):
                self._launch(self._batch.select_behind(started), started, on_layer, outcome)
            started = self._launched[0].since
            collected = self._launched.popleft()
            self._collect(collected, outcome)
            costs.measure(*collected.composition, self._clock() - started)
        ended = self._clock()
        for later in self._launched:
            later.since = ended
        return outcome.result(ended - started)

    def _streams(self) -> Streams:
        """Return the sequences that the next step must not delay, with their shortest gap limit. Any thread."""
        decoding, arriving, own_s = self._batch.decoding, self.arriving(), self._gap_limit_s
        limits = (*(prompt.state.gap_limit_s for prompt in decoding), *arriving)
        shortest_s = min((limit_s or own_s for limit_s in limits), default=own_s)
        return Streams(sum(len(prompt.live) for prompt in decoding), shortest_s, awaits_more=bool(arriving))

    def _launch(self, selection: Selection, now: float, on_layer: OnLayer | None, outcome: StepOutcome) -> None:
        """Launch the selected schedule, if it is not empty."""
        for prompt, error in selection.failed:
            self._fail(prompt, error, outcome)
        for prompt in selection.interrupted:
            outcome.interrupted.append((prompt.state.prompt_id, prompt.num_swaps, prompt.num_rebuilds))
        schedule = self._masked(selection.schedule, outcome)
        if not schedule:
            return
        batch = batch_of(schedule, self._launched[-1].samples if self._launched else {})
        announcer, runs_ahead = LayerAnnouncer(schedule, on_layer), self.runs_ahead
        is_wanted = announcer.is_wanted(runs_ahead=runs_ahead)
        block_ids = written_blocks(schedule, self.info.layout.block_size) if runs_ahead else ()
        self._blocks.begin_writes(block_ids)
        try:
            pending = self._model.launch(batch, announcer if is_wanted else None)
        except Exception as error:  # noqa: BLE001 - the launch's outermost frame: reported in `failed`
            self._blocks.end_writes(block_ids)
            outcome.num_tokens += len(batch.token_ids)
            self._fail_all(schedule, error, outcome)
            return
        num_chunk_tokens = sum(one.count for one in schedule if one.sequence is one.prompt.stem)
        num_served = sum(one.num_served for one in schedule if not one.prompt.state.probe)
        samples = samples_of(schedule) if runs_ahead else {}
        if runs_ahead:
            for scheduled in schedule:
                scheduled.sequence.launch(scheduled.count, awaits=scheduled.sequence in samples)
        self._launched.append(
            LaunchedStep(schedule, batch, pending, announcer, now, samples, block_ids, num_chunk_tokens, num_served)
        )

    def _masked(self, schedule: list[ScheduledTokens], outcome: StepOutcome) -> list[ScheduledTokens]:
        """Fill the token mask of each grammar; a grammar that fails ends only its own prompt."""
        bound = [scheduled for scheduled in schedule if scheduled.prompt.is_bound]
        for scheduled in bound:
            if not self._batch.runs(scheduled.prompt):
                continue  # the prompt failed with another of its sequences
            try:
                fill_masks(scheduled, self.info.vocab_size)
            except Exception as error:  # noqa: BLE001 - this prompt's own grammar: reported in `failed`
                self._fail(scheduled.prompt, error, outcome)
        return [scheduled for scheduled in schedule if self._batch.runs(scheduled.prompt)] if bound else schedule

    def _collect(self, step: LaunchedStep, outcome: StepOutcome) -> None:
        """Wait for a step and apply its output to each prompt, except those that have ended since the launch."""
        outcome.num_tokens += len(step.batch.token_ids)
        outcome.num_served += step.num_served
        try:
            try:
                output = step.pending.collect()
            finally:
                self._blocks.end_writes(step.block_ids)
            parts = read_output(output, step.batch, step.schedule)
        except Exception as error:  # noqa: BLE001 - the step's outermost frame: reported in `failed`
            self._fail_all(step.schedule, error, outcome)
            return
        runs_ahead = self.runs_ahead
        for scheduled, part in zip(step.schedule, parts, strict=True):
            if scheduled.sequence.finish is not None or not self._batch.runs(scheduled.prompt):
                continue  # the prompt has ended since the launch
            if runs_ahead:
                scheduled.sequence.collect(scheduled.count, awaits=scheduled.sequence in step.samples)
            if step.announcer.error is not None and scheduled.prompt.hold:
                self._fail(scheduled.prompt, step.announcer.error, outcome)
                continue
            try:
                self._advance(scheduled, part, output, outcome)
            except Exception as error:  # noqa: BLE001 - this prompt's own handling: reported in `failed`
                self._fail(scheduled.prompt, error, outcome)

    def _fail_all(self, schedule: list[ScheduledTokens], error: Exception, outcome: StepOutcome) -> None:
        """Fail the prompts of a step that failed, except those that have already ended."""
        live = [
            scheduled.prompt
            for scheduled in schedule
            if scheduled.sequence.finish is None and self._batch.runs(scheduled.prompt)
        ]
        for prompt in {id(prompt): prompt for prompt in live}.values():
            self._fail(prompt, error, outcome)

    def _accept(self, state: PromptState, *, hold: bool, grammar: Grammar | None) -> Prompt:
        if self._batch.find(state.prompt_id) is not None:
            raise InvalidRequest(f"prompt {state.prompt_id} is already in this engine")
        self._accepted += 1
        state = resolve(state, self.info.pooling)
        chain = self._blocks.chain(state)
        prompt = Prompt.of(state, age=self._accepted, hold=hold, max_model_len=self.info.max_model_len, chain=chain)
        if self.info.rope_sections and state.images:
            prompt.positions = GridPositions(state.images)
        if self.info.images_attend_within:
            prompt.spans = spans_of(state.images)
        prompt.bind(grammar)
        return prompt

    def _fail(self, prompt: Prompt, error: Exception, outcome: StepOutcome) -> None:
        self._batch.remove(prompt)
        outcome.fail(prompt.state, error)
