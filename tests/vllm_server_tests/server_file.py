"""One file of vLLM's tests on record, and the reasons that several files share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ANSWER = "it needs what its own model answers"
VOCABULARY = "it needs its own model's vocabulary: ids, or numbers of tokens"
ERROR_TYPE = "the type of an error is OpenAI's `invalid_request_error`, in vLLM `BadRequestError`"
WORDS = "the same refusal (400) in other words"
ADAPTERS = "adapters are not served"
ROUTES = "its routes are not served, by decision (docs/http-api.md)"


@dataclass(frozen=True, slots=True)
class ServerFile:
    """What a file's tests of the server do."""

    passed: int
    models: Mapping[str, str] = field(default_factory=lambda: {"*": "random"})
    """The kind of the model that stands for each, and for all others by `*`."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Why each of these fails, by its name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why tests do not run, by their names: of one with parameters, all, or those that begin so (left_out_names.py)."""
    num_left_out: int = 0
    ways: tuple[str, ...] = ("P/D",)


SMALL, SCRIPTED, TINY, VECTORS, CLASSES, IMAGES = (
    {"*": kind} for kind in ("small", "scripted", "tiny", "vectors", "classes", "images")
)
