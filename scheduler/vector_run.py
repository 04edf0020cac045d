"""Run one request for vectors or scores, a few prompts at a time, and report its outcome."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable

from scheduler.observability.request_done import RequestDone
from scheduler.observability.request_log import Reporting
from scheduler.request import Dispatcher, GenerationRequest, PromptDone
from scheduler.text_output import Observer
from scheduler.vectors import Values, collect_vectors


class VectorRun:
    """Runs `request`, `at_once` prompts at a time, so that large requests do not fill the queue.

    `served` is complete once `collect` has ended. `started_s` is when the request arrived, by the loop's clock.
    """

    def __init__(
        self, request: GenerationRequest, observer: Observer, *, at_once: int, started_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._request = request
        self._observer = observer
        self._at_once = at_once
        self._started_s = started_s
        self._clock = clock or asyncio.get_running_loop().time
        self.served: list[PromptDone] = []

    async def collect(self, dispatcher: Dispatcher) -> list[Values]:
        """Return the vector (or the score, as the only value) of each prompt. Raises the request's error."""
        found: list[Values] = []
        dispatched_s = self._clock() - self._started_s

        def done(outcome: str, error: str) -> RequestDone:
            seconds = self._clock() - self._started_s
            return RequestDone(self._request, tuple(self.served), outcome, seconds, dispatched_s, error=error)

        with Reporting(self._observer.request_done, done):
            for at in range(0, len(self._request.prompts), self._at_once):
                found += await collect_vectors(
                    dispatcher, self._sub_request(at), functools.partial(self._on_prompt_done, at)
                )
        return found

    def _sub_request(self, at: int) -> GenerationRequest:
        whole, part = self._request, slice(at, at + self._at_once)
        return dataclasses.replace(whole, prompts=whole.prompts[part], poolings=whole.poolings[part])

    def _on_prompt_done(self, at: int, done: PromptDone) -> None:
        self.served.append(dataclasses.replace(done, prompt_index=at + done.prompt_index))
        self._observer.prompt_done(done)
