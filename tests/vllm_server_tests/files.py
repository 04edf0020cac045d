"""The files of vLLM's `tests/entrypoints` that run here, and what their tests do: the record for each run.

A model stands for each of a file's models (tests/vllm_server_tests/models.py). A test is one of the server if it starts
one; the others of these files do not run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerFile:
    """What a file's tests of the server do."""

    passed: int
    models: Mapping[str, str] = field(default_factory=lambda: {"*": "random"})
    """The kind of the model that stands for each, and for all others by `*`."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Why each of these fails, by its name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why tests do not run, by the beginning of their names."""
    num_left_out: int = 0
    ways: tuple[str, ...] = ("P/D",)


_SMALL, _SCRIPTED = {"*": "small"}, {"*": "scripted"}
_BOTH = ("P/D", "combined")

FILES: dict[str, ServerFile] = {
    "openai/chat_completion/test_include_reasoning.py": ServerFile(6, _SCRIPTED),
    "openai/completion/test_completion.py": ServerFile(22, ways=_BOTH),
    "serve/tokenize/test_tokenization.py": ServerFile(9, _SMALL, ways=_BOTH),
}
