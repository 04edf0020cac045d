"""The local path: one instance computes the prompt and generates all its tokens, or continues an adopted stream."""

from collections.abc import Callable

from scheduler.adoption import Adoption
from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_on_instance import SessionLost
from scheduler.prompt_run import PromptRun
from wire.messages import Failed, Generate, Refused


class LocalPath:
    """Executes one plan on one instance: a combined one, or a prefill instance for a prompt that stays there.

    Calls `on_output` when the first token has arrived. `adoption`: the instance already decodes this adopted stream.
    """

    def __init__(self, instance: Instance, *, on_output: Callable[[], None], adoption: Adoption | None = None) -> None:
        self._instance = instance
        self._on_output = on_output
        self._adoption = adoption

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt until its sequences are finished. Raises the error that ended it."""
        adoption = self._adoption
        if adoption is not None:
            prompt.adopt(adoption.prompt)
        in_flight, prompt_id = self._instance.in_flight, prompt.prompt_id

        def decoding() -> None:
            in_flight.prefilled(prompt_id)
            in_flight.reserved(prompt_id)
            in_flight.decoding(prompt_id)
            self._on_output()
            prompt.enter(f"decoding on {self._instance}")

        with prompt.open_on(self._instance, decoding) as on_instance:
            if adoption is None:
                prompt.enter(f"in prefill on {self._instance}", computes=True)
                on_instance.post(Generate(prompt.state))
                in_flight.prefill_sent(prompt_id)
            else:
                await adoption.hand_over(on_instance)
            while (arrival := await prompt.next_event()) is not None:
                match arrival:
                    case _, Refused() | Failed() | SessionLost() as failure:
                        raise to_error(failure, self._instance, prompt)
            on_instance.ended |= prompt.output.all_finished
