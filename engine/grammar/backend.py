"""Load the backend. Its library is imported only then: an instance without it refuses structured output."""

from engine.grammar.interface import Backend
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.tokenizer_file import TokenizerFile
from wire.errors import NotInstalled


def make_backend(tokenizer: TokenizerFile, limits: GrammarLimits) -> Backend:
    """Load llguidance for one tokenizer. Raises NotInstalled, or InvalidGrammar if it cannot use the tokenizer."""
    try:
        from engine.grammar.llguidance_backend import LlguidanceBackend
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"this server lacks llguidance, which structured output needs: no module {error.name}"
        ) from error
    return LlguidanceBackend(tokenizer, limits, StepLimits())
