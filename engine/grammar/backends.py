"""Make a backend by its name. A backend's library is imported only when that backend is made."""

from engine.grammar.interface import Backend
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.tokenizer_file import TokenizerFile
from wire.errors import NotInstalled


def make_backend(name: str, tokenizer: TokenizerFile, limits: GrammarLimits) -> Backend:
    """Load `name` for one tokenizer. Raises NotInstalled, or InvalidGrammar if it cannot use the tokenizer."""
    try:
        from engine.grammar.llguidance_backend import LlguidanceBackend

        return LlguidanceBackend(tokenizer, limits, StepLimits())
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"this server lacks the structured output backend {name}, which this request needs: no module {error.name}"
        ) from error
