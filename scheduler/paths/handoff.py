"""The hand-off path: reserve on D, prefill on P, first tokens from P at once, the rest from D.

reserve on D --ticket--> prefill on P --first tokens--> client
                              ==KV==> D --tokens------> client

If P and D are workers of other engines (decode_first), D sends all the tokens.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from processes.failpoints import failpoint
from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.paths.failures import full_or, to_error
from scheduler.prompt_on_instance import PromptOnInstance, SessionLost
from scheduler.prompt_run import PromptRun
from scheduler.starvation import extended_timeout
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, PdserveError
from wire.messages import Failed, HandedOff, Prefill, Refused, Reserve, Reserved
from wire.types import Ticket

_log = EventLogger("handoff")


class HandoffPath:
    """Executes one plan: remote prefill, then decode. Calls `on_output` when the first token has arrived from D."""

    def __init__(
        self, prompt: PromptRun, prefill: Instance, decode: Instance, *, limits: ControlLimits,
        on_output: Callable[[], None],
    ) -> None:  # fmt: skip
        self._prompt = prompt
        self._prefill = prefill
        self._decode = decode
        self._limits = limits
        self._on_output = on_output
        self._decode_started = False
        self._lost_prefill: PdserveError | None = None

    async def run(self) -> None:
        """Run the prompt until all its sequences and its hand-off are finished. Raises the error that ended it."""
        prompt = self._prompt
        with prompt.open_on(self._decode, self._on_first_token_of_decode) as on_decode:
            ticket = await self._reserve(on_decode)
            if ticket is None:
                on_decode.ended |= prompt.output.all_finished
                return
            with prompt.open_on(self._prefill, self._on_first_token_of_prefill, generates=False) as on_prefill:
                prompt.enter(f"in prefill on {self._prefill}", computes=True)
                state = prompt.state  # only D needs to know of its stream
                on_prefill.post(Prefill(state if state.stream is None else replace(state, stream=None), ticket))
                self._prefill.in_flight.prefill_sent(prompt.prompt_id)
                while (arrival := await prompt.next_event()) is not None:
                    match arrival:
                        case _, HandedOff():
                            self._prefill.in_flight.prefilled(prompt.prompt_id)  # P may have sent no first token
                            self._prefill.in_flight.handed_off(prompt.prompt_id)
                        case on_instance, Refused() | Failed() | SessionLost() as failure if on_instance is on_prefill:
                            self._on_prefill_failed(failure)
                        case _, Refused() | Failed() | SessionLost() as failure:
                            await self._on_decode_failed(failure, on_prefill)
                on_decode.ended |= self._decode_started and prompt.output.all_finished
                await self._wait_for_prefill_end(on_prefill, on_decode)

    async def _reserve(self, on_decode: PromptOnInstance) -> Ticket | None:
        """Return the ticket; None if D, a worker of another engine, has generated everything without the KV."""
        prompt, state = self._prompt, self._prompt.state
        reads_images = state.chat is not None and self._decode.description.worker is not None
        compiles = state.params.structured is not None or reads_images  # D does so before it answers
        limit_s = self._limits.reserve_s + (self._limits.grammar_s if compiles else 0.0)
        prompt.enter(f"reserving blocks on {self._decode}")
        on_decode.post(Reserve(prompt.state))
        try:
            async with extended_timeout(limit_s, self._limits.starved, self._decode.starved_s):
                with self._unassign_while_compiling() if compiles else nullcontext():
                    while True:
                        match await prompt.next_event():
                            case _, Reserved(ticket=ticket, seconds=seconds):
                                self._decode.in_flight.reserved(prompt.prompt_id, ticket.first_token)
                                prompt.add_time("reserve_s", seconds)
                                return ticket
                            case _, Refused() | Failed() | SessionLost() as failure:
                                raise to_error(failure, self._decode, prompt)
                            case None:
                                return None
        except TimeoutError:
            late = InstanceLost(f"{self._decode} did not answer a reservation within {limit_s:g} s")
            raise full_or(self._decode, late) from None

    @contextmanager
    def _unassign_while_compiling(self) -> Iterator[None]:
        """If the grammar takes long to compile, release the prompt's share of the prefill instance's next step."""
        in_flight, prompt_id, facts = self._prefill.in_flight, self._prompt.prompt_id, self._prompt.facts
        is_unassigned = False

        def unassign() -> None:
            nonlocal is_unassigned
            is_unassigned = True
            in_flight.unassign(prompt_id)

        timer = asyncio.get_running_loop().call_later(self._limits.unassign_after_s, unassign)
        try:
            yield
            if is_unassigned:
                in_flight.assign_hand_off(prompt_id, facts, self._decode.index)
        finally:
            timer.cancel()

    def _on_first_token_of_prefill(self) -> None:
        """Record that P's first tokens have arrived."""
        self._prefill.in_flight.prefilled(self._prompt.prompt_id)
        if not self._decode_started:
            failpoint("scheduler.first_token")
            self._prompt.enter(f"handing off from {self._prefill} to {self._decode}")

    def _on_first_token_of_decode(self) -> None:
        """Record that D's first token has arrived."""
        failpoint("scheduler.between")
        self._decode_started = True
        self._decode.in_flight.decoding(self._prompt.prompt_id)
        self._on_output()
        self._prompt.enter(f"decoding on {self._decode}")

    def _on_prefill_failed(self, failure: Refused | Failed | SessionLost) -> None:
        """Handle P's failure. Once P's first tokens have arrived, D may have committed: an ack can be lost."""
        prompt, loop = self._prompt, asyncio.get_running_loop()
        self._prefill.in_flight.drop(prompt.prompt_id)
        if self._decode_started and prompt.output.all_started:
            return  # P has finished its part
        error = to_error(failure, self._prefill, prompt)
        if isinstance(failure, Refused) or not prompt.output.all_started:
            raise error
        self._lost_prefill = error
        settles_at = loop.time() + self._limits.settle_s * self._decode.slowness
        loop.call_at(min(settles_at, prompt.deadline), self._give_up, prompt.prompt_id)

    def _give_up(self, prompt_id: str) -> None:
        """Fail the attempt if D has still not reported that it committed."""
        if self._lost_prefill is not None and not self._decode_started and self._prompt.prompt_id == prompt_id:
            self._prompt.fail(self._lost_prefill)

    async def _on_decode_failed(self, failure: Refused | Failed | SessionLost, on_prefill: PromptOnInstance) -> None:
        """Handle D's failure. If P's first tokens finished all sequences, those tokens may still be in transit."""
        on_prefill.cancel()
        await self._prompt.ended_within(on_prefill, self._limits.settle_s * self._prefill.slowness)
        if self._prompt.output.open:
            error = to_error(failure, self._decode, self._prompt)
            self._prompt.fail(self._lost_prefill or error)

    async def _wait_for_prefill_end(self, on_prefill: PromptOnInstance, on_decode: PromptOnInstance) -> None:
        """Wait briefly for P's result of the hand-off; cancel the prompt if D no longer needs it."""
        if not on_decode.ended:
            on_prefill.cancel()
            on_decode.cancel()
        if not await self._prompt.ended_within(on_prefill, self._limits.settle_s * self._prefill.slowness):
            _log.warning("handoff_result_missing", request_id=self._prompt.request.request_id, prefill=self._prefill)
