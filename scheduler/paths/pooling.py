"""The pooling path: one instance reads the prompt and answers with a vector or a score; nothing is handed off."""

from collections.abc import Callable

from scheduler.inbox import SessionLost
from scheduler.instances import Instance
from scheduler.paths.failures import to_error
from scheduler.prompt_run import PromptRun
from wire.messages import Failed, Generate, Pooled, Refused


class PoolingPath:
    """Runs one plan on one prefill or combined instance. `answered` is called when the vector has come."""

    def __init__(self, instance: Instance, *, answered: Callable[[], None]) -> None:
        self._instance = instance
        self._answered = answered

    async def run(self, prompt: PromptRun) -> None:
        """Run the prompt to its answer. Raises what ended it otherwise."""
        with prompt.attend(self._instance) as work:
            prompt.enter(f"in pooling on {self._instance}")
            work.post(Generate(prompt.state))
            self._instance.books.prefill_sent(prompt.prompt_id)
            while True:
                match (await prompt.hear()).event:
                    case Pooled(values=values, times=times):
                        self._instance.books.prefilled(prompt.prompt_id)
                        prompt.add_times(times)
                        prompt.answer(values)
                        self._answered()
                        return
                    case Refused() | Failed() | SessionLost() as ending:
                        raise to_error(ending, self._instance, prompt)
                    case _:
                        continue
