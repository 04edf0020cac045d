"""The path over workers of other engines in which P returns references for D, before or after it computes the prompt.

prefill on P --references--> generate on D --tokens--> client
             ==KV, read by D or sent by P==> D
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from scheduler.instances import Instance
from scheduler.paths.failures import full_or, to_error
from scheduler.prompt_on_instance import PromptOnInstance, SessionLost
from scheduler.prompt_run import PromptRun
from wire.errors import HandoffFailed
from wire.messages import Failed, FetchAndGenerate, HandedOff, PrefillAndHold, PrefillBegun, PrefillHeld, Refused


class PrefillFirstPath:
    """Executes one plan. Calls `on_output` when the first token has arrived from D; P's own first token is not used.

    Until D has sent a token of each sequence, a failure of P fails the attempt: D may wait for KV that never arrives,
    or get another prompt's KV from a newer process at P's address. KV that D has not fetched stays on P until
    the KV's lease ends.
    """

    def __init__(
        self, prompt: PromptRun, prefill: Instance, decode: Instance, *, on_output: Callable[[], None]
    ) -> None:
        self._prompt = prompt
        self._prefill = prefill
        self._decode = decode
        self._on_output = on_output
        self._decode_started = False
        self._until_sent = ExitStack()

    async def run(self) -> None:
        """Run the prompt until all its sequences are finished. Raises the error that ended it."""
        prompt = self._prompt
        with self._until_sent:
            on_prefill = self._until_sent.enter_context(prompt.open_on(self._prefill, generates=False))
            self._until_sent.callback(self._prefill.in_flight.keep, prompt.prompt_id)
            found = await self._ask_prefill(on_prefill)
            with prompt.open_on(self._decode, partial(self._on_first_token, on_prefill, found)) as on_decode:
                if not self._prefill.is_living:
                    raise HandoffFailed(f"{self._prefill} may no longer hold the KV")
                on_decode.post(FetchAndGenerate(prompt.state, found.references))
                while (arrival := await prompt.next_event()) is not None:
                    match arrival:
                        case _, HandedOff():
                            self._on_sent(on_prefill, found.lease_s)
                        case on_instance, Refused() | Failed() | SessionLost() as failure:
                            if on_instance is on_decode:
                                raise to_error(failure, self._decode, prompt)
                            if not self._all_fetched():
                                raise to_error(failure, self._prefill, prompt)
                            self._release(on_prefill)
                on_decode.ended |= prompt.output.all_finished

    async def _ask_prefill(self, on_prefill: PromptOnInstance) -> PrefillHeld | PrefillBegun:
        prompt = self._prompt
        prompt.enter(f"in prefill on {self._prefill}", computes=True)
        on_prefill.post(PrefillAndHold(prompt.state))
        self._prefill.in_flight.prefill_sent(prompt.prompt_id)
        while True:
            match await prompt.next_event():
                case _, PrefillBegun() as begun:
                    return begun
                case _, PrefillHeld(times=times) as held:
                    self._prefill.in_flight.prefilled(prompt.prompt_id)
                    prompt.add_times(times)
                    prompt.enter(f"handing off from {self._prefill} to {self._decode}")
                    return held
                case _, Refused() | Failed() | SessionLost() as failure:
                    raise to_error(failure, self._prefill, prompt)

    def _on_sent(self, on_prefill: PromptOnInstance, lease_s: float) -> None:
        """Record that P has computed the prompt while D waited: D gets the KV soon, or never."""
        prompt = self._prompt
        self._prefill.in_flight.prefilled(prompt.prompt_id)
        if self._decode_started:
            self._release(on_prefill)
            return
        prompt.enter(f"handing off from {self._prefill} to {self._decode}")
        too_late = HandoffFailed(f"{self._decode} got no KV from {self._prefill}")
        give_up = lambda: prompt.fail(full_or(self._decode, too_late))  # noqa: E731
        self._until_sent.callback(asyncio.get_running_loop().call_later(lease_s, give_up).cancel)

    def _on_first_token(self, on_prefill: PromptOnInstance, found: PrefillHeld | PrefillBegun) -> None:
        """Record D's first token: D has the KV of that sequence, and P has released it."""
        prompt_id = self._prompt.prompt_id
        self._decode_started = True
        self._prefill.in_flight.prefilled(prompt_id)
        self._prefill.in_flight.handed_off(prompt_id)
        self._decode.in_flight.reserved(prompt_id)
        self._decode.in_flight.decoding(prompt_id)
        self._on_output()
        self._prompt.enter(f"decoding on {self._decode}")
        if len(found.references) == 1:
            self._release(on_prefill)

    def _all_fetched(self) -> bool:
        """Whether D has sent a new token of each sequence. An attempt starts with the tokens of earlier attempts."""
        before, output = self._prompt.state.outputs, self._prompt.output
        return self._decode_started and all(
            len(output.so_far[one]) > (len(before[one]) if before else 0) for one in output.open
        )

    def _release(self, on_prefill: PromptOnInstance) -> None:
        """Stop watching P if it has ended the prompt."""
        if on_prefill.ended:
            self._until_sent.close()
