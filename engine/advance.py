"""What a step has made for one piece goes to its prompt: tokens, candidates, a vector, or the end of its prefill."""

from collections.abc import Callable

from engine.blocks import BlockPool
from engine.ending import finish_of
from engine.interface import EngineInfo, PooledPrompt, Prefilled
from engine.outcome import Outcome
from engine.pooling.collected import Collected
from engine.prompt import Prompt
from engine.roster import Piece, Roster
from engine.step_reader import Chosen, PieceOutput
from wire.failpoints import failpoint
from wire.types import TokenOutput


class Advance:
    """The last verb of a step, over the core's own roster and blocks; what it makes is noted in an Outcome."""

    def __init__(self, info: EngineInfo, roster: Roster, blocks: BlockPool, clock: Callable[[], float]) -> None:
        self._info, self._roster, self._blocks, self._clock = info, roster, blocks, clock

    def __call__(self, piece: Piece, part: PieceOutput, outcome: Outcome) -> None:
        """Take what the step made for one piece. Raises what this prompt has to end with."""
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

    def _pool(self, prompt: Prompt, collected: Collected, part: PieceOutput, outcome: Outcome, *, ends: bool) -> None:
        """Take what a chunk gave to the prompt's vector; the last one ends it."""
        if part.pooled:
            collected.take(part.pooled)
        if not ends:
            return
        assert prompt.started_at is not None
        assert self._info.pooling is not None
        values = collected.finish(len(prompt.state.token_ids), self._info.pooling)
        seconds = self._clock() - prompt.started_at
        outcome.pooled.append(PooledPrompt(prompt.state.prompt_id, values, seconds, prompt.num_cached))
        self._roster.remove(prompt)

    def _append(self, prompt: Prompt, index: int, chosen: Chosen, outcome: Outcome) -> None:
        sequence, params = prompt.sequences[index], prompt.state.params
        if not prompt.hold:
            failpoint("decode.token")
        sequence.append(chosen.token_id)
        if sequence.finish is not None:
            return
        ending = finish_of(
            sequence.outputs, params, prompt_length=sequence.prompt_length, max_model_len=self._info.max_model_len
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

    def _search(self, prompt: Prompt, index: int, chosen: Chosen, outcome: Outcome) -> None:
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

    def _note_step(self, prompt: Prompt, outcome: Outcome) -> None:
        """Tell once how long the first step of an admitted prompt took."""
        if prompt.admitted_at is not None:
            outcome.first_steps.append((prompt.state.prompt_id, self._clock() - prompt.admitted_at))
            prompt.admitted_at = None

    def _end_prefill(self, prompt: Prompt, outcome: Outcome) -> None:
        assert prompt.started_at is not None
        seconds = self._clock() - prompt.started_at
        outcome.prefilled.append(Prefilled(prompt.described, prompt.ended, seconds, prompt.num_cached))
        if prompt.ended:
            self._roster.remove(prompt)
        else:
            self._roster.hold(prompt)
