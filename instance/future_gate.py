"""Hold back a prompt's command until a future that it needs is done: its compiled grammar or images' embeddings."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from wire.errors import InternalError, InvalidRequest, PdserveError

T = TypeVar("T")

Refuse = Callable[[PdserveError], None]


class FutureGate(Generic[T]):
    """Commands that wait, one per prompt. Runs on the event loop's thread, as does the session owning it.

    So a cancel finds the prompt either here or where its command was passed on to: there is no gap between the two.
    """

    def __init__(self, what: str, loop: asyncio.AbstractEventLoop) -> None:
        """`what` is what the prompts wait for, as named in messages."""
        self._what, self._loop = what, loop
        self._waiting: dict[str, Future[T]] = {}

    def check_new(self, prompt_id: str) -> None:
        """Raise InvalidRequest for a prompt that is already waiting here."""
        if prompt_id in self._waiting:
            raise InvalidRequest(f"prompt {prompt_id} is already waiting for {self._what}")

    def submit(self, prompt_id: str, future: "Future[T]", start: Callable[[T], None], refuse: Refuse) -> None:
        """Call `start` with the result, or `refuse` with the error, at once or when the future is done."""
        if future.done():
            self._resolve(future, start, refuse)
            return
        self._waiting[prompt_id] = future
        future.add_done_callback(lambda _: self._wake(prompt_id, future, start, refuse))

    def drop(self, prompt_id: str) -> bool:
        """Forget a prompt: neither of its callbacks is called any more. Returns whether it was waiting."""
        future = self._waiting.pop(prompt_id, None)
        if future is not None:
            future.cancel()  # no effect if other prompts share the future, as it is then running already
        return future is not None

    def drop_all(self) -> None:
        """Forget every prompt."""
        for prompt_id in list(self._waiting):
            self.drop(prompt_id)

    def _wake(self, prompt_id: str, future: "Future[T]", start: Callable[[T], None], refuse: Refuse) -> None:
        """Any thread."""

        def submit() -> None:
            if self._waiting.get(prompt_id) is future:
                del self._waiting[prompt_id]
                self._resolve(future, start, refuse)

        try:
            self._loop.call_soon_threadsafe(submit)
        except RuntimeError:  # the event loop has closed: nobody waits
            return

    def _resolve(self, future: "Future[T]", start: Callable[[T], None], refuse: Refuse) -> None:
        error = future.exception()
        if error is None:
            start(future.result())
        else:
            defect = InternalError(f"preparing {self._what} failed; see the instance's log")
            refuse(error if isinstance(error, PdserveError) else defect)
