"""The pooling path: one instance computes the prompt and returns a vector or a score; no KV is handed off."""

from collections.abc import Callable

from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_on_instance import SessionLost
from scheduler.prompt_run import PromptRun
from wire.messages import Failed, Generate, Pooled, Refused


class PoolingPath:
    """Executes one plan on one prefill or combined instance. Calls `on_output` when the vector has arrived."""

    def __init__(self, instance: Instance, *, on_output: Callable[[], None]) -> None:
        self._instance = instance
        self._on_output = on_output

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt until its vector or score has arrived. Raises the error that ended it."""
        with prompt.open_on(self._instance) as on_instance:
            prompt.enter(f"being pooled on {self._instance}")
            on_instance.post(Generate(prompt.state))
            self._instance.in_flight.prefill_sent(prompt.prompt_id)
            while True:
                match await prompt.next_event():
                    case _, Pooled(values=values):
                        self._instance.in_flight.prefilled(prompt.prompt_id)
                        prompt.answer(values)
                        self._on_output()
                        return
                    case _, Refused() | Failed() | SessionLost() as failure:
                        raise to_error(failure, self._instance, prompt)
