"""Both halves of an instance over one engine: pass a step's results, and a cancel, to the half that owns the prompt."""

from collections.abc import Callable, Iterable

from decode_worker.worker import DecodeWorker
from engine.interface import Engine, StepResult
from instance.step_parts import parts_of
from prefill_worker.worker import Embed, PrefillWorker
from wire.load import LoadSnapshot
from wire.messages import Cancel, Event, Step
from wire.types import PromptLogprobs, StageTimes, TokenOutput

Post = Callable[[Callable[[Engine], None]], None]


class Workers:
    """The prefill and the decode half. `emit` must be thread-safe."""

    def __init__(
        self,
        engine: Engine,
        post: Post,
        emit: Callable[[Event], None],
        load: Callable[[], LoadSnapshot],
        clock: Callable[[], float],
        embed: Embed | None = None,
    ) -> None:
        self.prefill = PrefillWorker(engine, post, emit, clock, embed)
        self.decode = DecodeWorker(engine, post, emit, clock)
        self._emit, self._load = emit, load

    def on_step(self, result: StepResult) -> None:
        """Send all new tokens in one message (step_parts.py), then commit the prefilled prompts. Engine thread."""
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
        """Send tokens and finishes, with the load after this step; drop those of prompts that ended in the meantime.

        The load is read before the locks are taken, so it may miss a finish that happened in between.
        """
        tokens = tuple(tokens)
        if not tokens and not times and not scored:
            return
        load = self._load()  # reading it takes other locks, so do it before taking these
        with self.prefill.hold_finishes(), self.decode.hold_finishes():
            tokens = tuple(token for token in tokens if self._is_here(token.prompt_id))
            times = tuple((prompt_id, spent) for prompt_id, spent in times if self._is_here(prompt_id))
            scored = tuple(part for part in scored if self._is_here(part.prompt_id))
            if tokens or times or scored:
                self.decode.on_tokens(tokens)
                for part in parts_of(Step(tokens, load, times, scored)):
                    self._emit(part)

    def cancel(self, command: Cancel) -> None:
        """Cancel a prompt or one of its sequences; emits nothing for an unknown prompt."""
        if not self.prefill.cancel(command.prompt_id, command.reason):
            self.decode.cancel(command.prompt_id, command.sequence, command.reason, self.send_tokens)

    def cancel_all(self, reason: str) -> None:
        """Cancel everything without emitting events: a next session must receive those of its own prompts only."""
        self.prefill.cancel_all(reason)
        self.decode.cancel_all(reason)

    def _is_here(self, prompt_id: str) -> bool:
        return self.decode.runs(prompt_id) or self.prefill.prefills(prompt_id)
