"""The hand-off path: reserve on D, prefill on P, first tokens from P at once, the rest from D.

reserve on D --ticket--> prefill on P --first tokens--> client
                              ==KV==> D --tokens------> client
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext

from processes.failpoints import failpoint
from scheduler.inbox import Arrival, PromptStep, SessionLost, Work
from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.paths.failures import to_error
from scheduler.patience import patient
from scheduler.prompt_run import PromptRun
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, InstanceLost, PdserveError
from wire.messages import Failed, HandedOff, Prefill, Refused, Reserve, Reserved
from wire.types import StageTimes, Ticket

log = EventLogger("handoff")


class HandoffPath:
    """Executes one plan: remote prefill, then decode. Calls `crossed` when the first token has arrived from D."""

    def __init__(
        self, prefill: Instance, decode: Instance, *, limits: ControlLimits, crossed: Callable[[], None]
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._limits = limits
        self._crossed = crossed
        self._decode_started = False
        self._in_doubt: tuple[PdserveError, float] | None = None

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt until all its sequences and its hand-off are finished. Raises the error that ended it."""
        with prompt.attend(self._decode) as on_decode:
            ticket = await self._reserve_in_time(prompt, on_decode)
            with prompt.attend(self._prefill) as on_prefill:
                prompt.enter(f"in prefill on {self._prefill}", computes=True)
                on_prefill.post(Prefill(prompt.state, ticket))
                self._prefill.in_flight.prefill_sent(prompt.prompt_id)
                while not prompt.output.all_ended:
                    await self._take(prompt, await self._next_arrival(prompt), on_prefill)
                on_decode.ended |= self._decode_started and prompt.output.all_finished
                await self._settle(prompt, on_prefill, on_decode)

    async def _reserve_in_time(self, prompt: PromptRun, on_decode: Work) -> Ticket:
        compiles = prompt.state.params.structured is not None
        limit_s = self._limits.reserve_s + (self._limits.grammar_s if compiles else 0.0)
        try:
            async with patient(limit_s, self._limits.starved, self._decode.starved_s):
                with self._put_off(prompt) if compiles else nullcontext():
                    return await self._reserve(prompt, on_decode)
        except TimeoutError:
            raise InstanceLost(f"{self._decode} did not answer a reservation within {limit_s:g} s") from None

    @contextmanager
    def _put_off(self, prompt: PromptRun) -> Iterator[None]:
        """While a grammar compiles for long, release the prompt's share of the prefill instance's next step."""
        in_flight, facts, is_put_off = self._prefill.in_flight, prompt.facts, False

        def put_off() -> None:
            nonlocal is_put_off
            is_put_off = True
            in_flight.put_off(prompt.prompt_id)

        timer = asyncio.get_running_loop().call_later(self._limits.put_off_s, put_off)
        try:
            yield
            if is_put_off:
                in_flight.give_to_hand_off(prompt.prompt_id, facts.num_tokens, self._decode.index, facts.num_sequences)
        finally:
            timer.cancel()

    async def _reserve(self, prompt: PromptRun, on_decode: Work) -> Ticket:
        prompt.enter(f"reserving blocks on {self._decode}")
        state = prompt.state
        on_decode.post(Reserve(state))
        while True:
            match (await prompt.next_arrival()).event:
                case Reserved(ticket=ticket, seconds=seconds):
                    self._decode.in_flight.reserved(state.prompt_id, ticket.first_token)
                    prompt.add_times(StageTimes(reserve_s=seconds))
                    return ticket
                case Refused() | Failed() | SessionLost() as ending:
                    raise to_error(ending, self._decode, prompt)
                case _:
                    continue

    async def _next_arrival(self, prompt: PromptRun) -> Arrival:
        """Return the next arrival. While it is unknown whether D committed, D has `settle_s` to report it."""
        if self._in_doubt is None or self._decode_started:
            return await prompt.next_arrival()
        error, deadline = self._in_doubt
        try:
            async with asyncio.timeout_at(deadline):
                return await prompt.next_arrival()
        except (TimeoutError, DeadlineExceeded):
            raise error from None

    async def _take(self, prompt: PromptRun, arrival: Arrival, on_prefill: Work) -> None:
        from_prefill = arrival.work is on_prefill
        match arrival.event:
            case PromptStep() as step if arrival.work is not None:
                arrival.work.stepping = not from_prefill
                if step.tokens and not self._decode_started:
                    failpoint("scheduler.first_token" if from_prefill else "scheduler.between")
                prompt.take(step, arrival.work)
                if from_prefill and step.tokens:
                    self._prefilled(prompt)
                elif step.tokens:
                    self._decoding(prompt, arrival.work)
            case HandedOff(times=times):
                self._prefill.in_flight.handed_off(prompt.prompt_id)
                prompt.add_times(times)
            case Refused() | Failed() | SessionLost() as ending if from_prefill:
                self._lose_prefill(prompt, ending)
            case Refused() | Failed() | SessionLost() as ending:
                await self._take_last_tokens(prompt, on_prefill)
                if not prompt.output.all_ended:
                    error = to_error(ending, self._decode, prompt)
                    raise self._in_doubt[0] if self._in_doubt else error
            case _:
                return

    def _lose_prefill(self, prompt: PromptRun, ending: Refused | Failed | SessionLost) -> None:
        """Handle P's failure. Once P's first tokens are here D may still have committed: an ack can be lost."""
        self._prefill.in_flight.drop(prompt.prompt_id)
        if self._decode_started and prompt.output.all_started:
            return  # P has finished its part
        error = to_error(ending, self._prefill, prompt)
        if isinstance(ending, Refused) or not prompt.output.all_started:
            raise error
        settle_s = self._limits.settle_s * self._decode.slowness
        self._in_doubt = (error, asyncio.get_running_loop().time() + settle_s)

    def _prefilled(self, prompt: PromptRun) -> None:
        self._prefill.in_flight.prefilled(prompt.prompt_id)
        if not self._decode_started:
            prompt.enter(f"handing off from {self._prefill} to {self._decode}")

    def _decoding(self, prompt: PromptRun, on_decode: Work) -> None:
        if not self._decode_started:
            self._decode_started = True
            self._decode.in_flight.decoding(prompt.prompt_id)
            self._crossed()
            prompt.enter(f"decoding on {self._decode}")
            prompt.flow(on_decode)

    async def _take_last_tokens(self, prompt: PromptRun, on_prefill: Work) -> None:
        """Handle D's failure. If P's first tokens finished all sequences, they are still in transit: take them."""
        on_prefill.cancel()
        async for arrival in self._until_ended(prompt, on_prefill):
            if arrival.work is on_prefill and isinstance(arrival.event, PromptStep):
                tokens = arrival.event.tokens
                if len(tokens) == prompt.request.params.num_sequences and all(token.finish for token in tokens):
                    prompt.take(arrival.event, on_prefill)

    async def _settle(self, prompt: PromptRun, on_prefill: Work, on_decode: Work) -> None:
        """Wait briefly for P's result of the hand-off; cancel the prompt if D no longer needs it."""
        if not on_decode.ended:
            on_prefill.cancel()
            on_decode.cancel()
        async for _ in self._until_ended(prompt, on_prefill):
            pass

    async def _until_ended(self, prompt: PromptRun, on_prefill: Work) -> AsyncIterator[Arrival]:
        """Yield arrivals until P's final event, for `settle_s` at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.settle_s * self._prefill.slowness
        while not on_prefill.ended or not prompt.inbox.empty():
            try:
                arrival = await prompt.inbox.get(deadline)
            except TimeoutError:
                log.warning("handoff_unsettled", request_id=prompt.request.request_id, prefill=self._prefill)
                return
            if isinstance(arrival.event, HandedOff):
                prompt.add_times(arrival.event.times)
            yield arrival
