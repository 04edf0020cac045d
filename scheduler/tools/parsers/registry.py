"""The formats of tool calls by their names, which are vLLM's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.parsers import (
    deepseek,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format: its steps, and the texts that must reach them even if they are special tokens.

    `short_ids`: its chat templates accept only ids of nine letters and digits. `frames_content`: answers without calls
    have markers too, so all answers are parsed.
    """

    steps: Callable[[CallReader], Steps[None]]
    markers: tuple[str, ...]
    short_ids: bool = False
    frames_content: bool = False


_DEEPSEEK_V3 = CallFormat(deepseek.DEEPSEEK_V3.steps, (*deepseek.DEEPSEEK_V3.markers, deepseek.SEPARATOR))
_DEEPSEEK_V31 = CallFormat(deepseek.DEEPSEEK_V31.steps, (*deepseek.DEEPSEEK_V31.markers, deepseek.SEPARATOR))
_GLM45 = CallFormat(glm45.glm45, glm45.MARKERS)
_HERMES = CallFormat(hermes.hermes, hermes.MARKERS)
_KIMI_K2 = CallFormat(kimi_k2.KIMI_K2.steps, (*kimi_k2.KIMI_K2.markers, kimi_k2.ARGUMENTS))
_LLAMA_JSON = CallFormat(llama3_json.llama3_json, llama3_json.MARKERS)
_PYTHONIC = CallFormat(pythonic.pythonic, pythonic.MARKERS)
_QWEN3_CODER = CallFormat(qwen3_coder.qwen3_coder, qwen3_coder.MARKERS)

CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": CallFormat(mistral.mistral, mistral.MARKERS, short_ids=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "glm45": _GLM45,
    "glm47": _GLM45,
    "kimi_k2": _KIMI_K2,
    "openai": CallFormat(harmony.harmony, harmony.MARKERS, frames_content=True),
})  # fmt: skip
