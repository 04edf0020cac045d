"""Hold back the commands of structured-output prompts until their grammar is compiled, or refuse them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.grammar.interface import Grammar
from wire.errors import InternalError, InvalidGrammar, InvalidRequest, PdserveError
from wire.types import PromptState

if TYPE_CHECKING:
    from engine.grammar.store import GrammarStore

Start = Callable[[Grammar | None], None]


class GrammarGate:
    """Commands that wait for a grammar, one per prompt. Runs on the event loop's thread, as does the session owning it.

    So a cancel finds the prompt either here or where its command was passed on: there is no gap between the two.
    """

    def __init__(self, grammars: "GrammarStore | None", loop: asyncio.AbstractEventLoop) -> None:
        self._grammars, self._loop = grammars, loop
        self._waiting: dict[str, Future[Grammar]] = {}

    def submit(self, state: PromptState, start: Start, refuse: Callable[[PdserveError], None]) -> None:
        """Call `start` with the prompt's grammar (None if it has none), or `refuse`, at once or when compilation ends.

        Raises InvalidRequest for a prompt that is already waiting here.
        """
        structured = state.params.structured
        if structured is None:
            start(None)
            return
        if state.prompt_id in self._waiting:
            raise InvalidRequest(f"prompt {state.prompt_id} is already waiting for its grammar")
        if self._grammars is None:
            refuse(
                InvalidGrammar(
                    "structured output is not possible here: it needs the model's tokenizer.json and a real engine"
                )
            )
            return
        future = self._grammars.prepare(structured)
        if future.done():
            _resolve(future, start, refuse)
            return
        self._waiting[state.prompt_id] = future
        future.add_done_callback(lambda _: self._wake(state.prompt_id, future, start, refuse))

    def drop(self, prompt_id: str) -> bool:
        """Forget a prompt: neither of its callbacks is called any more. Returns whether it was waiting."""
        return self._waiting.pop(prompt_id, None) is not None

    def drop_all(self) -> None:
        """Forget every prompt."""
        self._waiting.clear()

    def _wake(
        self, prompt_id: str, future: "Future[Grammar]", start: Start, refuse: Callable[[PdserveError], None]
    ) -> None:
        """Any thread."""

        def submit() -> None:
            if self._waiting.get(prompt_id) is future:
                del self._waiting[prompt_id]
                _resolve(future, start, refuse)

        try:
            self._loop.call_soon_threadsafe(submit)
        except RuntimeError:  # the event loop has closed: nobody waits
            return


def _resolve(future: "Future[Grammar]", start: Start, refuse: Callable[[PdserveError], None]) -> None:
    error = future.exception()
    if error is None:
        start(future.result())
    else:
        refuse(error if isinstance(error, PdserveError) else InternalError("the grammar compiler failed; see its log"))
