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
    have markers too, so all answers are parsed. A chat template of this format has all texts `shown`, and none of those
    in `absent`.
    """

    steps: Callable[[CallReader], Steps[None]]
    markers: tuple[str, ...]
    shown: tuple[str, ...]
    absent: tuple[str, ...] = ()
    short_ids: bool = False
    frames_content: bool = False


_DEEPSEEK_V3 = CallFormat(
    deepseek.DEEPSEEK_V3.steps, (*deepseek.DEEPSEEK_V3.markers, deepseek.SEPARATOR),
    shown=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
)  # fmt: skip
_DEEPSEEK_V31 = CallFormat(
    deepseek.DEEPSEEK_V31.steps, (*deepseek.DEEPSEEK_V31.markers, deepseek.SEPARATOR),
    shown=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), absent=("```json",),
)  # fmt: skip
_GLM45 = CallFormat(
    glm45.glm45, glm45.MARKERS, shown=("<tool_call>", "<arg_key>", "<arg_value>"), absent=("<tool_sep>",)
)  # fmt: skip
_HERMES = CallFormat(
    hermes.hermes, hermes.MARKERS,
    shown=("<tool_call>", "arguments"), absent=("<arg_key>", "<function=", "<tool_sep>", "<tool_calls>"),
)  # fmt: skip
_KIMI_K2 = CallFormat(
    kimi_k2.KIMI_K2.steps, (*kimi_k2.KIMI_K2.markers, kimi_k2.ARGUMENTS),
    shown=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
)  # fmt: skip
_LLAMA_JSON = CallFormat(llama3_json.llama3_json, llama3_json.MARKERS, shown=('{"name": function name, "parameters"',))
_MISTRAL = CallFormat(mistral.mistral, mistral.MARKERS, shown=("[TOOL_CALLS]",), short_ids=True)
_OPENAI = CallFormat(
    harmony.harmony, harmony.MARKERS, shown=("<|start|>", "<|channel|>", "<|message|>"), frames_content=True
)  # fmt: skip
_PYTHONIC = CallFormat(pythonic.pythonic, pythonic.MARKERS, shown=("[func_name1(",))
_QWEN3_CODER = CallFormat(
    qwen3_coder.qwen3_coder, qwen3_coder.MARKERS, shown=("<tool_call>", "<function=", "<parameter=")
)  # fmt: skip

CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "glm45": _GLM45,
    "glm47": _GLM45,
    "kimi_k2": _KIMI_K2,
    "openai": _OPENAI,
})  # fmt: skip


def format_of_template(template: str | None) -> str | None:
    """Return the name of the one format that a chat template shows, None if it shows none or several."""
    if template is None:
        return None
    found = [
        name
        for name, one in CALL_FORMATS.items()
        if all(text in template for text in one.shown) and not any(text in template for text in one.absent)
    ]
    return found[0] if len({CALL_FORMATS[name] for name in found}) == 1 else None
