"""Apply a step's output to the prompts: tokens, beam candidates, pooled vectors, and the end of a prefill."""

from collections.abc import Callable

from engine.batch_state import BatchState
from engine.finish import finish_at
from engine.interface import EngineInfo, PooledPrompt, Prefilled
from engine.kv.blocks import BlockPool
from engine.outcome import StepOutcome
from engine.pooling.collected import Collected
from engine.prompt import Prompt, ScheduledTokens
from engine.step import Candidates, StepOutput
from engine.step_reader import ScheduledOutput
from processes.failpoints import failpoint
from wire.types import TokenLogprobs, TokenOutput


class Advance:
    """The last phase of a step: changes the core's batch state and blocks, and records results in a StepOutcome."""

    def __init__(self, info: EngineInfo, state: BatchState, blocks: BlockPool, clock: Callable[[], float]) -> None:
        self._info, self._batch, self._blocks, self._clock = info, state, blocks, clock

    def __call__(
        self, scheduled: ScheduledTokens, part: ScheduledOutput, output: StepOutput, outcome: StepOutcome
    ) -> None:
        """Apply the output for one sequence's scheduled tokens. Raises the error with which this prompt must fail."""
        prompt = scheduled.prompt
        if part.failure is not None:
            raise part.failure
        scheduled.sequence.advance(scheduled.count, self._blocks)
        if scheduled.sequence is prompt.stem:
            self._advance_stem(scheduled, part, output, outcome)
        elif scheduled.reaches_end:
            self._take_rows(scheduled, part, output, outcome)
            if (scheduled.sequence.finish is not None or prompt.beams is not None) and prompt.ended:
                self._batch.remove(prompt)

    def _advance_stem(
        self, scheduled: ScheduledTokens, part: ScheduledOutput, output: StepOutput, outcome: StepOutcome
    ) -> None:
        """Apply the output for the prompt's own tokens; its last chunk ends the prefill."""
        prompt = scheduled.prompt
        if prompt.collected is not None:
            self._pool(prompt, prompt.collected, part, outcome, ends=scheduled.reaches_end)
            return
        if part.prompt_logprobs is not None:
            outcome.prompt_logprobs.append(part.prompt_logprobs)
        if not scheduled.reaches_end:
            if prompt.hold:
                failpoint("prefill.between_chunks")
            return
        self._take_rows(scheduled, part, output, outcome)
        if prompt.hold:
            self._end_prefill(prompt, outcome)
            return
        if prompt.started_at is not None and not prompt.num_interruptions:  # a recomputed prompt is already reported
            seconds = self._clock() - prompt.started_at
            written = scheduled.sequence.num_written
            outcome.computed.append((prompt.state.prompt_id, seconds, prompt.num_cached, written))
        if prompt.ended:
            self._batch.remove(prompt)
        else:
            prompt.fork(self._blocks)

    def _take_rows(
        self, scheduled: ScheduledTokens, part: ScheduledOutput, output: StepOutput, outcome: StepOutcome
    ) -> None:
        """Append to each sampled sequence the token, or the beam candidates, of its output row."""
        prompt = scheduled.prompt
        for row, index in enumerate(scheduled.sampled, part.row):
            if not prompt.hold:
                failpoint("decode.token")
            if prompt.beams is not None:
                self._search(prompt, index, output.candidates[row], outcome)
            else:
                logprobs = output.logprobs[row] if output.logprobs else None
                self._append_token(prompt, index, output.token_ids[row], logprobs, outcome)
            if prompt.admitted_at is not None:  # the first step of an admitted prompt is reported once
                outcome.first_steps.append((prompt.state.prompt_id, self._clock() - prompt.admitted_at))
                prompt.admitted_at = None

    def _pool(
        self, prompt: Prompt, collected: Collected, part: ScheduledOutput, outcome: StepOutcome, *, ends: bool
    ) -> None:
        """Add a chunk's part of the prompt's vector; the last chunk finishes the prompt."""
        if part.pooled:
            collected.take(part.pooled)
        if not ends:
            return
        assert prompt.started_at is not None
        assert self._info.pooling is not None
        values = collected.finish(len(prompt.state.token_ids), self._info.pooling)
        seconds = self._clock() - prompt.started_at
        outcome.pooled.append(PooledPrompt(prompt.state.prompt_id, values, seconds, prompt.num_cached))
        self._batch.remove(prompt)

    def _append_token(
        self, prompt: Prompt, index: int, token_id: int, logprobs: TokenLogprobs | None, outcome: StepOutcome
    ) -> None:
        sequence, state = prompt.sequences[index], prompt.state
        sequence.append(token_id)
        if sequence.finish is not None:
            return
        length, num_outputs = sequence.prompt_length, sequence.num_outputs
        finished = finish_at(
            sequence.token_ids, num_outputs, state.params, prompt_length=length, max_model_len=self._info.max_model_len
        )
        finish, stop_token_id = finished or (None, None)
        outcome.tokens.append(
            TokenOutput(state.prompt_id, index, num_outputs - 1, token_id, finish, stop_token_id, logprobs)
        )
        if finish is not None:
            sequence.finish = finish
            sequence.drop(self._blocks)

    def _search(self, prompt: Prompt, index: int, candidates: Candidates | None, outcome: StepOutcome) -> None:
        """Pass candidates to a beam; the hypotheses are emitted when the search has ended."""
        beams = prompt.beams
        assert beams is not None
        assert candidates is not None, "a beam's row has candidates"
        if prompt.stem is not None:
            beams.begin(candidates, prompt.stem)
        else:
            beams.offer(index, candidates, self._blocks)
        outcome.progressed.append(prompt.state.prompt_id)
        if beams.has_ended:
            outcome.tokens.extend(prompt.finish_hypotheses())

    def _end_prefill(self, prompt: Prompt, outcome: StepOutcome) -> None:
        assert prompt.started_at is not None
        assert prompt.stem is not None
        seconds, written = self._clock() - prompt.started_at, prompt.stem.num_written
        outcome.prefilled.append(Prefilled(prompt.described, prompt.ended, seconds, prompt.num_cached, written))
        if prompt.ended:
            self._batch.remove(prompt)
        else:
            self._batch.hold(prompt)
