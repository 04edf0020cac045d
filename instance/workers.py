"""Both halves of an instance over one engine: pass a step's results, and a cancel, to the half that has the prompt.

Each prompt belongs to the session that sent it, or has adopted it: only this owner gets its events and may cancel it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from decode_worker.worker import DecodeWorker
from engine.interface import Engine, StepResult
from instance.step_parts import parts_of
from prefill_worker.worker import Embed, PrefillWorker
from wire.claim_table import ClaimTable
from wire.event_sink import EventSink
from wire.load import LoadSnapshot
from wire.messages import Adopt, Cancel, Step
from wire.types import PromptLogprobs, StageTimes, TokenOutput

Post = Callable[[Callable[[Engine], None]], None]


@dataclass(slots=True)
class _Part:
    """One owner's part of a step."""

    tokens: list[TokenOutput] = field(default_factory=list)
    times: list[tuple[str, StageTimes]] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)


class Workers:
    """The prefill and the decode half. `freed` is called when blocks of a prompt are free again, on any thread."""

    def __init__(
        self, engine: Engine, post: Post, load: Callable[[], LoadSnapshot], clock: Callable[[], float],
        embed: Embed | None = None, freed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        def post_release(release: Callable[[Engine], None]) -> None:
            def work(engine: Engine) -> None:
                release(engine)
                freed()

            post(work)

        self.prefill = PrefillWorker(engine, post, post_release, clock, embed)
        self.decode = DecodeWorker(engine, post, post_release, clock)
        self._load, self._freed = load, freed
        self.claims = ClaimTable()

    def on_step(self, result: StepResult) -> None:
        """Send each owner its tokens (step_parts.py); handle prefilled, pooled and failed prompts. Engine thread."""
        times = [(prompt_id, StageTimes(first_step_s=seconds)) for prompt_id, seconds in result.first_steps]
        times += [
            (prompt_id, StageTimes(prefill_s=seconds, cached_tokens=cached, written_tokens=written))
            for prompt_id, seconds, cached, written in result.computed
        ]
        times += [(id_, StageTimes(num_swaps=swaps, num_rebuilds=again)) for id_, swaps, again in result.interrupted]
        timed = {prompt_id for prompt_id, _ in times}
        times += [(prompt_id, StageTimes()) for prompt_id in result.progressed if prompt_id not in timed]
        self.send_tokens(result.tokens, tuple(times), result.prompt_logprobs)
        for prefilled in result.prefilled:
            self.prefill.on_prefilled(prefilled)
        for pooled in result.pooled:
            self.decode.on_pooled(pooled)
        for prompt_id, error in result.failed:
            if not self.prefill.on_failed(prompt_id, error):
                self.decode.on_failed(prompt_id, error)

    def send_tokens(
        self, tokens: Iterable[TokenOutput], times: tuple[tuple[str, StageTimes], ...] = (),
        scored: tuple[PromptLogprobs, ...] = (),
    ) -> None:  # fmt: skip
        """Send each owner its tokens and finishes, with the load after this step; drop those of ended prompts.

        The load is read before the locks are taken, so it may miss a finish that happened in between.
        """
        tokens = tuple(tokens)
        if not tokens and not times and not scored:
            return
        load = self._load()  # reading it takes other locks, so do it before taking these
        with self.prefill.hold_finishes(), self.decode.hold_finishes():
            parts = self._by_owner(tokens, times, scored)
            self.decode.on_tokens(tokens)
            for owner, part in parts.items():
                for step in parts_of(Step(tuple(part.tokens), load, tuple(part.times), tuple(part.scored))):
                    owner.emit(step)
        if any(token.finish is not None for token in tokens):
            self._freed()

    def cancel(self, owner: EventSink, command: Cancel) -> None:
        """Cancel a prompt of this owner or one of its sequences; emits nothing for any other prompt."""
        if not self.prefill.cancel(owner, command.prompt_id, command.reason):
            self.decode.cancel(
                owner, command.prompt_id, command.sequence, command.reason, self.send_tokens, command.owner_epoch
            )

    def adopt(self, owner: EventSink, command: Adopt) -> None:
        """Make `owner` the owner of a stream, and send it the tokens so far; events of the next step follow."""
        with self.decode.hold_finishes():
            tokens = self.decode.adopt(owner, command)
            for step in parts_of(Step(tokens, None)) if tokens else ():
                owner.emit(step)

    def cancel_all(self, owner: EventSink, reason: str, *, keep_streams: bool = False) -> bool:
        """Cancel every prompt of this owner: its session has ended.

        With `keep_streams`, streams that may have reached a client continue; return whether there are any.
        """
        self.prefill.cancel_all(owner, reason)
        return self.decode.cancel_all(owner, reason, keep_streams=keep_streams)

    def _by_owner(
        self, tokens: Iterable[TokenOutput], times: Iterable[tuple[str, StageTimes]], scored: Iterable[PromptLogprobs]
    ) -> dict[EventSink, _Part]:
        """Return the parts of a step by owner, without those of prompts that ended. The locks are held."""
        parts: dict[EventSink, _Part] = {}

        def part_of(prompt_id: str) -> _Part:
            owner = self.decode.owner_of(prompt_id) or self.prefill.owner_of(prompt_id)
            if owner is None:
                return ended
            part = parts.get(owner)
            if part is None:
                part = parts[owner] = _Part()
            return part

        ended = _Part()
        for token in tokens:
            part_of(token.prompt_id).tokens.append(token)
        for entry in times:
            part_of(entry[0]).times.append(entry)
        for one in scored:
            part_of(one.prompt_id).scored.append(one)
        return parts
