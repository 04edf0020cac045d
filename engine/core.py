"""The engine: a continuous batch over one model and one pool of blocks. Integers only, no torch.

One step is four verbs: select (roster.py), launch and collect (the model), advance (below).
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from engine.assembly import Announcer, batch_of
from engine.batcher import BatchLimits
from engine.blocks import BlockPool
from engine.ending import finish_of
from engine.grammar.interface import Grammar
from engine.interface import (
    EngineInfo,
    EngineLoad,
    Memory,
    Model,
    OnLayer,
    PooledPrompt,
    Prefilled,
    StepResult,
)
from engine.masks import fill_masks
from engine.pooling.collected import Collected, resolve
from engine.prefix import why_no_names
from engine.prompt import Prompt
from engine.requirements import check_begun, check_runnable
from engine.roster import Piece, Roster
from engine.step_reader import Chosen, PieceOutput, read_output
from engine.swap import SwapArea
from telemetry.logs import EventLogger
from wire.errors import InternalError, InvalidRequest
from wire.failpoints import failpoint
from wire.types import PromptLogprobs, PromptState, TokenOutput

_log = EventLogger("engine")


@dataclass(slots=True)
class _Outcome:
    """What a step has made so far."""

    tokens: list[TokenOutput] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    first_steps: list[tuple[str, float]] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    progressed: list[str] = field(default_factory=list)
    pooled: list[PooledPrompt] = field(default_factory=list)


class EngineCore:
    """The `Engine` over any `Model`. One thread calls it; `check`, `load` and `blocks` may be used from any."""

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_size: int,
        prefix_caching: bool = True,
        swap_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix_caching`: keep KV that may be wanted again, where blocks have names at all (prefix.py).

        `swap_bytes`: most memory for copies of preempted sequences' blocks.
        """
        self._model = model
        self._limits = BatchLimits(max_num_seqs, max_num_batched_tokens, prefill_chunk_size)
        self._clock = clock
        layout = model.info.layout
        caches = prefix_caching and why_no_names(layout.block_size) is None
        self._blocks = BlockPool(
            layout.num_blocks, cached_block_size=layout.block_size if caches else None, rope=model.info.rope
        )
        self._roster = Roster(model, self._blocks, SwapArea(model, swap_bytes), self._limits)
        self._accepted = 0

    @property
    def info(self) -> EngineInfo:
        """What the loaded model and its pool are."""
        return self._model.info

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

    def add(self, state: PromptState, *, hold: bool = False, grammar: Grammar | None = None) -> None:
        """Queue a prompt whose KV is computed here. Raises what `check` raises; held, only its prompt has to fit.

        Raises InvalidGrammar for outputs so far that `grammar` does not allow.
        """
        self.check(state, hold=hold)
        self._roster.queue(self._accept(state, hold=hold, grammar=grammar))

    def admit(self, state: PromptState, block_ids: Many[int], grammar: Grammar | None = None) -> None:
        """Start a prompt whose KV lies in `block_ids`. If it raises (as `check`), the references stay the caller's."""
        layout = self.info.layout
        wanted = layout.num_blocks_for(len(state.token_ids))
        if len(block_ids) < wanted:
            raise InvalidRequest(f"{len(block_ids)} blocks cannot hold {len(state.token_ids)} tokens: {wanted} do")
        check_begun(state)
        prompt = self._accept(state, hold=False, grammar=grammar)
        if not prompt.ended:
            self.check(state)
            prompt.admitted_at = self._clock()
        prompt.receive(block_ids[:wanted], self._blocks)
        self._blocks.release(block_ids[wanted:])
        if not prompt.ended:
            self._roster.running[state.prompt_id] = prompt

    def cancel(self, prompt_id: str, sequence: int | None = None) -> tuple[TokenOutput, ...]:
        """End a prompt or one of its sequences; return their endings. Idempotent; the blocks are free on return."""
        prompt = self._roster.find(prompt_id)
        if prompt is None:
            return ()
        chosen = range(len(prompt.sequences)) if sequence is None else (sequence,)
        live = [i for i in chosen if 0 <= i < len(prompt.sequences) and prompt.sequences[i].finish is None]
        endings = tuple(prompt.cancel(i, self._blocks) for i in live)
        if prompt.ended:
            self._roster.remove(prompt)
        return endings

    def release(self, prompt_id: str) -> None:
        """Free what a held prompt holds. Idempotent."""
        prompt = self._roster.held.get(prompt_id)
        if prompt is not None:
            self._roster.remove(prompt)

    def has_work(self) -> bool:
        """Whether `step` would compute something. False while all that runs waits for blocks that others hold."""
        return self._roster.has_work()

    def load(self) -> EngineLoad:
        """Return the figures of now. Any thread."""
        roster = self._roster
        return EngineLoad(
            running=len(roster.running),
            waiting=len(roster.waiting),
            uncomputed_tokens=sum(prompt.uncomputed_tokens for prompt in roster.prompts()),
            held_prompts=len(roster.held),
            preemptions=roster.preemptions,
            blocks_swapped=roster.swap.num_used,
        )

    def close(self) -> None:
        """Give the pool back; nothing may follow. Idempotent."""
        self._model.close()

    def step(self, on_layer: OnLayer | None = None) -> StepResult:
        """Compute one batch. Whatever fails ends the prompts it belongs to (`failed`); the others go on."""
        started = self._clock()
        outcome = _Outcome()
        selection = self._roster.select(started)
        for prompt, error in selection.failed:
            self._fail(prompt, error, outcome)
        pieces = self._masked(selection.pieces, outcome)
        if pieces:
            self._compute(pieces, on_layer, outcome)
        return StepResult(
            tokens=tuple(outcome.tokens),
            prefilled=tuple(outcome.prefilled),
            failed=tuple(outcome.failed),
            first_steps=tuple(outcome.first_steps),
            cached=tuple(outcome.cached),
            seconds=self._clock() - started,
            prompt_logprobs=tuple(outcome.prompt_logprobs),
            progressed=tuple(dict.fromkeys(outcome.progressed)),
            pooled=tuple(outcome.pooled),
        )

    def _masked(self, pieces: list[Piece], outcome: _Outcome) -> list[Piece]:
        """Find out what each grammar allows next; a prompt whose grammar cannot go on ends alone."""
        for piece in pieces:
            try:
                fill_masks(piece, self.info.vocab_size)
            except Exception as error:  # noqa: BLE001 - this prompt's own grammar: answered in `failed`
                self._fail(piece.prompt, error, outcome)
        return [piece for piece in pieces if self._roster.runs(piece.prompt)]

    def _compute(self, pieces: list[Piece], on_layer: OnLayer | None, outcome: _Outcome) -> None:
        batch, announcer = batch_of(pieces), Announcer(pieces, on_layer)
        try:
            output = self._model.launch(batch, announcer if announcer.wanted else None).collect()
            parts = read_output(output, batch, pieces)
        except Exception as error:  # noqa: BLE001 - the step's outermost frame: answered in `failed`
            for prompt in {id(piece.prompt): piece.prompt for piece in pieces}.values():
                self._fail(prompt, error, outcome)
            return
        for piece, part in zip(pieces, parts, strict=True):
            if announcer.error is not None and piece.prompt.hold:
                self._fail(piece.prompt, announcer.error, outcome)
            elif self._roster.runs(piece.prompt):
                self._try_to_advance(piece, part, outcome)

    def _try_to_advance(self, piece: Piece, part: PieceOutput, outcome: _Outcome) -> None:
        try:
            self._advance(piece, part, outcome)
        except Exception as error:  # noqa: BLE001 - this prompt's own handling: answered in `failed`
            self._fail(piece.prompt, error, outcome)

    def _advance(self, piece: Piece, part: PieceOutput, outcome: _Outcome) -> None:
        prompt, ends = piece.prompt, piece.reaches_end
        if part.failure is not None:
            raise part.failure
        piece.sequence.advance(piece.count, self._blocks)
        if prompt.collected is not None:
            self._pool(prompt, prompt.collected, part, outcome, ends=ends)
            return
        if part.prompt_logprobs is not None:
            outcome.prompt_logprobs.append(part.prompt_logprobs)
        if not ends:
            if prompt.hold:
                failpoint("prefill.between_chunks")
            return
        for index, chosen in zip(piece.sampled, part.chosen, strict=True):
            if prompt.beams is not None:
                self._search(prompt, index, chosen, outcome)
            else:
                self._append(prompt, index, chosen, outcome)
        if piece.sequence is prompt.stem and prompt.num_cached and not prompt.hold:
            outcome.cached.append((prompt.state.prompt_id, prompt.num_cached))
        if prompt.hold:
            self._end_prefill(prompt, outcome)
        elif prompt.ended:
            self._roster.remove(prompt)
        elif piece.sequence is prompt.stem:
            prompt.fork(self._blocks)

    def _pool(self, prompt: Prompt, collected: Collected, part: PieceOutput, outcome: _Outcome, *, ends: bool) -> None:
        """Take what a chunk gave to the prompt's vector; the last one ends it."""
        if part.pooled:
            collected.take(part.pooled)
        if not ends:
            return
        assert prompt.started_at is not None
        assert self.info.pooling is not None
        values = collected.finish(len(prompt.state.token_ids), self.info.pooling)
        seconds = self._clock() - prompt.started_at
        outcome.pooled.append(PooledPrompt(prompt.state.prompt_id, values, seconds, prompt.num_cached))
        self._roster.remove(prompt)

    def _append(self, prompt: Prompt, index: int, chosen: Chosen, outcome: _Outcome) -> None:
        sequence, params = prompt.sequences[index], prompt.state.params
        if not prompt.hold:
            failpoint("decode.token")
        sequence.append(chosen.token_id)
        if sequence.finish is not None:
            return
        ending = finish_of(
            sequence.outputs, params, prompt_length=sequence.prompt_length, max_model_len=self.info.max_model_len
        )
        finish, stop_token_id = ending or (None, None)
        prompt_id, position = prompt.state.prompt_id, sequence.num_outputs - 1
        outcome.tokens.append(
            TokenOutput(prompt_id, index, position, chosen.token_id, finish, stop_token_id, chosen.logprobs)
        )
        if finish is not None:
            sequence.finish = finish
            sequence.drop(self._blocks)
        self._note_step(prompt, outcome)

    def _search(self, prompt: Prompt, index: int, chosen: Chosen, outcome: _Outcome) -> None:
        """Give a beam its candidates; the hypotheses are told when the search is over."""
        beams = prompt.beams
        assert beams is not None
        assert chosen.candidates is not None, "a row that asks for candidates gets them"
        if not prompt.hold:
            failpoint("decode.token")
        if prompt.stem is not None:
            beams.begin(chosen.candidates, prompt.stem)
        else:
            beams.offer(index, chosen.candidates, self._blocks)
        outcome.progressed.append(prompt.state.prompt_id)
        self._note_step(prompt, outcome)
        if beams.over:
            outcome.tokens.extend(prompt.tell_hypotheses())

    def _note_step(self, prompt: Prompt, outcome: _Outcome) -> None:
        """Tell once how long the first step of an admitted prompt took."""
        if prompt.admitted_at is not None:
            outcome.first_steps.append((prompt.state.prompt_id, self._clock() - prompt.admitted_at))
            prompt.admitted_at = None

    def _end_prefill(self, prompt: Prompt, outcome: _Outcome) -> None:
        assert prompt.started_at is not None
        seconds = self._clock() - prompt.started_at
        outcome.prefilled.append(Prefilled(prompt.described, prompt.ended, seconds, prompt.num_cached))
        if prompt.ended:
            self._roster.remove(prompt)
        else:
            self._roster.hold(prompt)

    def _accept(self, state: PromptState, *, hold: bool, grammar: Grammar | None) -> Prompt:
        if self._roster.find(state.prompt_id) is not None:
            raise InvalidRequest(f"prompt {state.prompt_id} is here already")
        self._accepted += 1
        state = resolve(state, self.info.pooling)
        chain = self._blocks.chain(state)
        prompt = Prompt.of(state, age=self._accepted, hold=hold, max_model_len=self.info.max_model_len, chain=chain)
        if grammar is not None:
            prompt.bind(grammar)
        return prompt

    def _fail(self, prompt: Prompt, error: Exception, outcome: _Outcome) -> None:
        prompt_id = prompt.state.prompt_id
        _log.error("prompt_failed", error, prompt_id=prompt_id, request_id=prompt.state.request_id)
        self._roster.remove(prompt)
        if not isinstance(error, InvalidRequest):  # which is the request's own fault, in its own words
            failure = InternalError(f"the step of this prompt failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        outcome.failed.append((prompt_id, error))
