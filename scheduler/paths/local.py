"""The local path: one instance computes the prompt and generates all its tokens."""

from collections.abc import Callable

from scheduler.inbox import PromptStep, SessionLost, Work
from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_run import PromptRun
from wire.messages import Failed, Generate, Refused


class LocalPath:
    """Executes one plan on one instance: a combined one, or a prefill instance for a prompt that stays there.

    Calls `crossed` when the first token has arrived.
    """

    def __init__(self, instance: Instance, *, crossed: Callable[[], None]) -> None:
        self._instance = instance
        self._crossed = crossed
        self._started = False

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt until its sequences are finished. Raises the error that ended it."""
        with prompt.attend(self._instance) as work:
            prompt.enter(f"in prefill on {self._instance}", computes=True)
            work.post(Generate(prompt.state))
            self._instance.in_flight.prefill_sent(prompt.prompt_id)
            while not prompt.output.all_ended:
                match (await prompt.next_arrival()).event:
                    case PromptStep() as step:
                        work.stepping = True
                        prompt.take(step, work)
                        self._note_tokens(prompt, step, work)
                    case Refused() | Failed() | SessionLost() as ending:
                        raise to_error(ending, self._instance, prompt)
                    case _:
                        continue
            work.ended |= prompt.output.all_finished

    def _note_tokens(self, prompt: PromptRun, step: PromptStep, work: Work) -> None:
        if step.tokens and not self._started:
            self._started = True
            self._instance.in_flight.prefilled(prompt.prompt_id)
            self._instance.in_flight.reserved(prompt.prompt_id)
            self._instance.in_flight.decoding(prompt.prompt_id)
            self._crossed()
            prompt.enter(f"decoding on {self._instance}")
            prompt.flow(work)
