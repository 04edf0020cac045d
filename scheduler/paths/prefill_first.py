"""The path over workers of other engines that prefill first: P holds the KV, D fetches it and generates.

prefill on P --reference--> generate on D --tokens--> client
     P ==KV, when D asks==> D
"""

import asyncio
from collections.abc import Callable

from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_on_instance import SessionLost
from scheduler.prompt_run import PromptRun
from wire.errors import HandoffFailed
from wire.messages import Failed, FetchAndGenerate, PrefillAndHold, PrefillHeld, Refused


class PrefillFirstPath:
    """Executes one plan. Calls `on_output` when the first token has arrived from D; P's own first token is not used."""

    def __init__(
        self, prompt: PromptRun, prefill: Instance, decode: Instance, *, on_output: Callable[[], None]
    ) -> None:
        self._prompt = prompt
        self._prefill = prefill
        self._decode = decode
        self._on_output = on_output

    async def run(self) -> None:
        """Run the prompt until all its sequences are finished. Raises the error that ended it."""
        held, held_at = await self._prefill_and_hold()
        prompt = self._prompt
        with prompt.open_on(self._decode, self._on_first_token) as on_decode:
            prompt.enter(f"handing off from {self._prefill} to {self._decode}")
            if not self._prefill.is_living or asyncio.get_running_loop().time() - held_at > held.lease_s:
                raise HandoffFailed(f"{self._prefill} may no longer hold the KV")
            on_decode.post(FetchAndGenerate(prompt.state, held.references))
            while (arrival := await prompt.next_event()) is not None:
                match arrival:
                    case _, Refused() | Failed() | SessionLost() as failure:
                        raise to_error(failure, self._decode, prompt)
            on_decode.ended |= prompt.output.all_finished

    async def _prefill_and_hold(self) -> tuple[PrefillHeld, float]:
        prompt = self._prompt
        with prompt.open_on(self._prefill, generates=False) as on_prefill:
            prompt.enter(f"in prefill on {self._prefill}", computes=True)
            on_prefill.post(PrefillAndHold(prompt.state))
            self._prefill.in_flight.prefill_sent(prompt.prompt_id)
            while True:
                match await prompt.next_event():
                    case _, PrefillHeld(times=times) as held:
                        self._prefill.in_flight.prefilled(prompt.prompt_id)
                        prompt.add_times(times)
                        return held, asyncio.get_running_loop().time()
                    case _, Refused() | Failed() | SessionLost() as failure:
                        raise to_error(failure, self._prefill, prompt)

    def _on_first_token(self) -> None:
        """D's first token is here: it has fetched the KV, and P has released it."""
        prompt_id = self._prompt.prompt_id
        self._prefill.in_flight.handed_off(prompt_id)
        self._decode.in_flight.reserved(prompt_id)
        self._decode.in_flight.decoding(prompt_id)
        self._on_output()
        self._prompt.enter(f"decoding on {self._decode}")
