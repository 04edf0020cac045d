"""Make a backend by its name. What a backend imports, only its own name imports."""

from engine.grammar.interface import Backend
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.tokenizer_file import TokenizerFile
from wire.errors import InvalidGrammar
from wire.structured_output import LLGUIDANCE


def make_backend(name: str, tokenizer: TokenizerFile, limits: GrammarLimits) -> Backend:
    """Load `name` for one tokenizer. Raises InvalidGrammar where it is not installed or cannot use the tokenizer."""
    try:
        from engine.grammar.llguidance_backend import LlguidanceBackend

        first = LlguidanceBackend(tokenizer, limits, StepLimits())
        if name == LLGUIDANCE:
            return first
        from engine.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(tokenizer, limits, first.token_bytes())
    except ModuleNotFoundError as error:
        raise InvalidGrammar(
            f"the structured output backend {name} is not installed: no module {error.name}"
        ) from error
