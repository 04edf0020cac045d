"""The local path: one instance computes the prompt and generates to its end, the first token or all."""

from collections.abc import Callable

from scheduler.inbox import PromptStep, SessionLost, Work
from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_run import PromptRun
from wire.messages import Failed, Generate, Refused


class LocalPath:
    """Runs one plan on one instance: a combined one, or a prefill instance for a prompt that stays there.

    `crossed` is called when a token has come.
    """

    def __init__(self, instance: Instance, *, crossed: Callable[[], None]) -> None:
        self._instance = instance
        self._crossed = crossed
        self._started = False

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt to the end of its sequences. Raises what ended it otherwise."""
        with prompt.attend(self._instance) as work:
            prompt.enter(f"in prefill on {self._instance}", computes=True)
            work.post(Generate(prompt.state))
            self._instance.books.prefill_sent(prompt.prompt_id)
            while not prompt.output.all_ended:
                match (await prompt.hear()).event:
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
            self._instance.books.prefilled(prompt.prompt_id)
            self._instance.books.reserved(prompt.prompt_id)
            self._instance.books.decoding(prompt.prompt_id)
            self._crossed()
            prompt.enter(f"decoding on {self._instance}")
            prompt.flow(work)
