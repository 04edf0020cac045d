"""Hold back the commands of structured-output prompts until their grammar is compiled, or refuse them."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.grammar.interface import Grammar
from instance.future_gate import FutureGate, Refuse
from wire.errors import InvalidGrammar
from wire.types import PromptState

if TYPE_CHECKING:
    from engine.grammar.store import GrammarStore

Start = Callable[[Grammar | None], None]


class GrammarGate:
    """Commands that wait for a grammar, one per prompt; see FutureGate."""

    def __init__(self, grammars: "GrammarStore | None", loop: asyncio.AbstractEventLoop) -> None:
        self._grammars = grammars
        self._gate: FutureGate[Grammar] = FutureGate("its grammar", loop)

    def submit(self, state: PromptState, start: Start, refuse: Refuse) -> None:
        """Call `start` with the prompt's grammar (None if it has none), or `refuse`, at once or when compilation ends.

        Raises InvalidRequest for a prompt that is already waiting here.
        """
        structured = state.params.structured
        if structured is None:
            start(None)
            return
        self._gate.check_new(state.prompt_id)
        if self._grammars is None:
            refuse(
                InvalidGrammar(
                    "structured output is not possible here: it needs the model's tokenizer.json and a real engine"
                )
            )
            return
        self._gate.submit(state.prompt_id, self._grammars.prepare(structured), start, refuse)

    def drop(self, prompt_id: str) -> bool:
        """Forget a prompt: neither of its callbacks is called any more. Returns whether it was waiting."""
        return self._gate.drop(prompt_id)

    def drop_all(self) -> None:
        """Forget every prompt."""
        self._gate.drop_all()
