"""Write what vLLM's own parsers of tool calls return for generated texts, whole and in pieces, as one table each.

    PYTHON_OF_VLLM tests/scheduler/tool_calls_by_vllm.py [FORMAT ...]

Run with vLLM 0.32.0 it writes tests/scheduler/tool_call_tables/FORMAT.json. The tables have facts only; the tests
compare the steps of scheduler/tools/parsers/ with them.
"""

import json
import logging
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent / "tool_call_tables"
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"},
    "flag": {"type": "boolean"}, "items": {"type": "array"}, "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
}  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "text": ("", "Paris", "東京 é 😀", 'a "quoted" \\ text', "line\nbreak", "}, ] { [", "5", "it's", " a ", "1 < 2"),
    "count": (0, -7, 12345678901234567890), "ratio": (-2.5, 3, 1e20), "flag": (True, False),
    "items": ([], [1, [2, {"a": "b"}]], ["x", "y"], [None, True]),
    "options": ({}, {"nested": {"deep": ["x", {"y": "}"}]}}, {"name": "inner", "arguments": {}}),
    "maybe": (None, "null and void", ""), "any": ("plain", "{}", "é"),
}  # fmt: skip
NAMES = ("weather", "get_time", "f1", "search")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": SCHEMAS}}}
    for name in NAMES
]
CONTENTS = ("", "", "Let me look.", "Let me look.\n", "\n\n", "1 < 2 and <tool", "<b>é</b> \n ", "[not a call] ")
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Format:
    """How a model writes calls, vLLM's parser of it, and malformed texts.

    `starts`: calls are found from the start of the text alone.
    """

    parser: str
    write: Callable[[random.Random, list[Call]], str]
    malformed: tuple[str, ...]
    markers: tuple[str, ...]
    starts: bool = False


def _json(chance: random.Random, value: Any, *, lines: bool = True) -> str:
    separators = (",", ":") if chance.random() < 0.3 else None
    indent = chance.choice((None, None, 1)) if lines else None
    return json.dumps(value, ensure_ascii=chance.random() < 0.3, indent=indent, separators=separators)


def _hermes(chance: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: Any) -> str:
        space = chance.choice(("\n", "\n", "", " "))
        return f"<tool_call>{space}{_json(chance, {'name': name, 'arguments': arguments})}{space}</tool_call>"

    return chance.choice(("\n", "")).join(one(*call) for call in calls)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(chance: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        space = chance.choice(("\n", "\n", "\n", ""))
        values = (f"<parameter={key}>{space}{_plain(value)}{space}</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm45(chance: random.Random, calls: list[Call]) -> str:
    space = chance.choice(("\n", ""))

    def one(name: str, arguments: dict[str, Any]) -> str:
        values = (
            f"<arg_key>{key}</arg_key>{space}<arg_value>{_plain(value)}</arg_value>{space}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{space}{''.join(values)}</tool_call>"

    return space.join(one(*call) for call in calls)


def _deepseek_v3(chance: random.Random, calls: list[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(chance, arguments, lines=False)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>" if calls else ""


def _deepseek_v31(chance: random.Random, calls: list[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(chance, arguments, lines=False)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>" if calls else ""


def _kimi_k2(chance: random.Random, calls: list[Call]) -> str:
    space = chance.choice(("", "", "\n"))
    written = [
        f"<|tool_call_begin|>{space}functions.{name}:{at}{space}<|tool_call_argument_begin|>{space}"
        f"{_json(chance, arguments)}{space}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>" if calls else ""


def _llama3_json(chance: random.Random, calls: list[Call]) -> str:
    key = chance.choice(("parameters", "parameters", "arguments"))
    objects = [_json(chance, {"name": name, key: arguments}) for name, arguments in calls]
    return (chance.choice(("<|python_tag|>", "")) if calls else "") + "; ".join(objects)


def _mistral(chance: random.Random, calls: list[Call]) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{chance.choice(('', ' '))}{_json(chance, objects)}" if calls else ""


def _mistral_v11(chance: random.Random, calls: list[Call]) -> str:
    between = chance.choice(("[ARGS]", ""))
    return "".join(f"[TOOL_CALLS]{name}{between}{_json(chance, arguments)}" for name, arguments in calls)


def _pythonic(chance: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = (f"{key}={json.dumps(v) if isinstance(v, str) and chance.random() < 0.5 else repr(v)}"
                  for key, v in arguments.items())  # fmt: skip
        return f"{name}({', '.join(values)})"

    return f"[{', '.join(one(*call) for call in calls)}]" if calls else ""


_HERMES_MALFORMED = (
    "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<tool_call>no</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '<tool_call>[1]</tool_call> and more',
    '</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "a </tool_call> b <tool_call> c",
    '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>', "<tool_call>\n<tool_call>\n",
    '<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call> The weather is fine.',
    '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>no</tool_call>',
    '<tool_call>{"name": "f", "parameters": {}}</tool_call>', "[f(" * 200,
)  # fmt: skip
_QWEN_CALL = "<tool_call>\n<function=f1>\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>"
_QWEN_MALFORMED = (
    "<tool_call>", "<tool_call>no</tool_call>", "a </tool_call> b", "<function=f1>\n</function>",
    "<function=f1><parameter=count>five</parameter></function>", "<tool_call>\n<function=\n</function></tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=flag>yes</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=count>\n007\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=ratio>\nNaN\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=items>\n[1, oops\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=unknown>\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=count>5<parameter=text>x</parameter></function></tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=text>\n\n x \n\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f1>\n<parameter=text>\n<b></tool_call></b>\n</parameter>\n</function>\n</tool_call>",
    f"{_QWEN_CALL}\nThe weather is fine.", f"{_QWEN_CALL}\n<tool_call>no</tool_call>",
    f"{_QWEN_CALL.removesuffix('</tool_call>')}{_QWEN_CALL}",
)  # fmt: skip
_GLM_CALL = "<tool_call>f1\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
_GLM_MALFORMED = (
    "<tool_call>",
    "<tool_call>no</tool_call>",
    "a </tool_call> b",
    "<tool_call>f1</tool_call>",
    "<tool_call>unknown\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "<tool_call>f1\n<arg_key>count</arg_key>\n<arg_value>five</arg_value>\n</tool_call>",
    "<tool_call>f1\n<arg_key>flag</arg_key><arg_value>False</arg_value></tool_call>",
    "<tool_call>f1\n<arg_key>other</arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call>f1\n<arg_key>text</arg_key><arg_value>\n x \n</arg_value></tool_call>",
    f"{_GLM_CALL}\nThe weather is fine.",
    f"{_GLM_CALL}<tool_call>no</tool_call>",
)
_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_V3 = f"{_DS_CALL}function{_DS_SEP}f1\n```json\n%s\n```{_DS_CALL_END}"
_V31 = f"{_DS_CALL}f1{_DS_SEP}%s{_DS_CALL_END}"


def _deepseek_malformed(one: str) -> tuple[str, ...]:
    return (
        _DS_BEGIN, f"{_DS_BEGIN}{_DS_END}", f"{_DS_BEGIN}{_DS_CALL}no{_DS_CALL_END}{_DS_END}",
        f"{_DS_BEGIN}{one % '{}'}", f"{_DS_BEGIN}{one % '{}'}{_DS_END} The weather is fine.",
        f"{_DS_BEGIN}{one % 'no'}{_DS_END}", one % "{}",
        _DS_BEGIN + one % '{\n "text": "a"\n}' + _DS_END,
        _DS_BEGIN + one % f'{{"text": "{_DS_CALL_END}"}}' + _DS_END,
    )  # fmt: skip


_KIMI = "<|tool_call_begin|>functions.f1:%s<|tool_call_argument_begin|>%s<|tool_call_end|>"
_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_MALFORMED = (
    _KIMI_BEGIN, f"{_KIMI_BEGIN}{_KIMI_END}", f"{_KIMI_BEGIN}<|tool_call_begin|>no<|tool_call_end|>{_KIMI_END}",
    f"{_KIMI_BEGIN}{_KIMI % (0, '{}')}{_KIMI_END} The weather is fine.", f"{_KIMI_BEGIN}{_KIMI % (0, '')}{_KIMI_END}",
    f"{_KIMI_BEGIN}{_KIMI % (7, '{}')}{_KIMI_END}", f"{_KIMI_BEGIN}{_KIMI % ('x', '{}')}{_KIMI_END}",
    f"{_KIMI_BEGIN}{_KIMI % (0, '{}')}{_KIMI_END}{_KIMI_BEGIN}{_KIMI % (1, '{}')}{_KIMI_END}", _KIMI % (0, "{}"),
    f"{_KIMI_BEGIN}{_KIMI % (0, 'no')}{_KIMI_END}",
    _KIMI_BEGIN + _KIMI % (0, '{"text": "<|tool_call_end|>"}') + _KIMI_END,
)  # fmt: skip
_LLAMA_CALL = '{"name": "f1", "parameters": {"count": 5}}'
_LLAMA_MALFORMED = (
    "{", "{}", '{"city": "Paris"}', '{"name": "f1"}', '{"name": "f1", "parameters"', "<|python_tag|>",
    "<|python_tag|>search.call(query='x')", f"{_LLAMA_CALL};{_LLAMA_CALL}", f"{_LLAMA_CALL} The weather is fine.",
    f"Let me look. {_LLAMA_CALL}", f"Let me look.<|python_tag|>{_LLAMA_CALL}", f"\n{_LLAMA_CALL}",
    '{"type": "function", "name": "f1", "parameters": {}}', '{"parameters": {"count": 5}, "name": "f1"}',
    '{"name": "f1", "parameters": {"count": ]}}', f"[{_LLAMA_CALL}, {_LLAMA_CALL}]",
)  # fmt: skip
_MISTRAL_MALFORMED = (
    "[TOOL_CALLS]",
    "[TOOL_CALLS]no",
    "[TOOL_CALLS] []",
    "[TOOL_CALLS][{}]",
    '[TOOL_CALLS]{"name": "f1"}',
    '[TOOL_CALLS]{"name": "f1", "arguments": {}}',
    '[TOOL_CALLS][{"arguments": {"count": 5}, "name": "f1"}]',
    '[TOOL_CALLS][TOOL_CALLS][{"name": "f1", "arguments": {}}]',
    '[TOOL_CALLS][{"name": "f1", "arguments": {}}] The weather is fine.',
    '[{"name": "f1", "arguments": {}}]',
    '[TOOL_CALLS][{"name": "f1", "arguments": {}}][TOOL_CALLS][{"name": "search", "arguments": {}}]',
    '[TOOL_CALLS][{"name": "f1", "arguments": {"text": "[TOOL_CALLS]"}}]',
    '[TOOL_CALLS][{"name": "f1", "arguments": "{\\"count\\": 5}"}]', '[TOOL_CALLS][{"name": "f1", "arguments": null}]',
    '[TOOL_CALLS][{"arguments": "{\\"count\\": 5}", "name": "f1"}]',
)  # fmt: skip
_MISTRAL_V11_MALFORMED = (
    "[TOOL_CALLS]",
    "[TOOL_CALLS]no",
    "[TOOL_CALLS]f1[ARGS]",
    "[TOOL_CALLS]f1{}",
    "[TOOL_CALLS] f1 [ARGS] {}",
    '[TOOL_CALLS]f1[ARGS]{"count": 5} The weather is fine.',
    "f1[ARGS]{}",
    '[TOOL_CALLS]f1[CALL_ID]abcdefghi[ARGS]{"count": 5}',
    "[TOOL_CALLS]f1[ARGS]no",
    '[TOOL_CALLS]f1[ARGS]{"text": "[TOOL_CALLS]"}',
    '[TOOL_CALLS]f1[ARGS]{"name": "x", "arguments": {}}',
)
_PYTHONIC_MALFORMED = (
    "[", "[]", "[1, 2]", "[a](https://b)", "[f1", "[f1(", "[f1()", "[f1('x')]", "[f1(count=5), 3]",
    "[f1(count=5)] The weather is fine.", "Let me look. [f1(count=5)]", "f1(count=5)", "[f1(flag=true, maybe=null)]",
    "[f1(count=-5, ratio=1e3)]", "[f1(text='a\\'b\\n\\x41\\u00e9')]", "[f1(text='a\nb')]", "[f1(items=(1, 2))]",
    "[f1(options={'a': {'b': [1]}})]", "[f1(count=other)]", "[f1(text='a' 'b')]", "[f1( count = 5 , flag = True, )]",
    "[f1(text='''a\"b''')]", "[a.b(count=5)]", "\n[f1(count=5)]", "[f1(count=5)",
)  # fmt: skip
_LLAMA4_MALFORMED = (
    "<|python_start|>[f1(count=5)]<|python_end|>", "<|python_start|>no<|python_end|>", "[f1(count=5)]",
)  # fmt: skip

FORMATS = {
    "hermes": Format("hermes", _hermes, _HERMES_MALFORMED, ("<tool_call>", "</tool_call>")),
    "qwen3_coder": Format("qwen3_coder", _qwen3_coder, _QWEN_MALFORMED, ("<tool_call>", "</tool_call>")),
    "glm45": Format(
        "glm45", _glm45, _GLM_MALFORMED,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": Format(
        "deepseek_v3", _deepseek_v3, _deepseek_malformed(_V3), (_DS_BEGIN, _DS_END, _DS_CALL, _DS_CALL_END, _DS_SEP)
    ),
    "deepseek_v31": Format(
        "deepseek_v31", _deepseek_v31, _deepseek_malformed(_V31), (_DS_BEGIN, _DS_END, _DS_CALL, _DS_CALL_END, _DS_SEP)
    ),
    "kimi_k2": Format(
        "kimi_k2", _kimi_k2, _KIMI_MALFORMED,
        (_KIMI_BEGIN, _KIMI_END, "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "llama3_json": Format("llama3_json", _llama3_json, _LLAMA_MALFORMED, ("<|python_tag|>",), starts=True),
    "mistral": Format("mistral", _mistral, _MISTRAL_MALFORMED, ("[TOOL_CALLS]",)),
    "mistral_v11": Format("mistral", _mistral_v11, _MISTRAL_V11_MALFORMED, ("[TOOL_CALLS]", "[ARGS]")),
    "pythonic": Format("pythonic", _pythonic, _PYTHONIC_MALFORMED, (), starts=True),
    "llama4_pythonic": Format(
        "llama4_pythonic", _pythonic, _LLAMA4_MALFORMED, ("<|python_start|>", "<|python_end|>"), starts=True
    ),
}  # fmt: skip


def texts(one: Format) -> dict[str, list[str]]:
    """Return right texts, the same cut, and malformed ones."""
    chance = random.Random(0)
    right = []
    for _ in range(30):
        calls = []
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            keys = chance.sample(sorted(VALUES), chance.randrange(5))
            calls.append((chance.choice(NAMES), {key: chance.choice(VALUES[key]) for key in keys}))
        content = chance.choice(CONTENTS)
        right.append(("" if one.starts and calls else content) + one.write(chance, calls))
    right = list(dict.fromkeys(right))
    cut = [text[: chance.randrange(1, len(text))] for text in right if len(text) > 1][:20]
    return {"right": right, "cut": list(dict.fromkeys(cut)), "malformed": list(one.malformed)}


class Vocabulary:
    """A tokenizer of a format's markers."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.ids = {text: at for at, text in enumerate(markers, 1)}

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the markers."""
        return self.ids


def main() -> None:
    """Write the tables of the formats named on the command line, or of all."""
    logging.disable(logging.CRITICAL)
    from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore[import-not-found]
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

    request = SimpleNamespace(
        tools=[ChatCompletionToolsParam(**tool) for tool in TOOLS], tool_choice="auto", include_reasoning=True
    )
    for name in sys.argv[1:] or FORMATS:
        one = FORMATS[name]
        kind = ToolParserManager.get_tool_parser(one.parser)
        rows = []
        for group, members in texts(one).items():
            for text in members:
                whole = _whole(kind, one, text, request)
                streamed = _streamed(kind, one, text, request)
                row = {"text": text, "group": group, "whole": whole}
                rows.append(row if streamed == whole else row | {"streamed": streamed})
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _whole(kind: Any, one: Format, text: str, request: Any) -> list[Any]:
    made = kind(Vocabulary(one.markers), request.tools).extract_tool_calls(text, request)
    return [made.content or "", [[call.function.name, call.function.arguments] for call in made.tool_calls]]


def _streamed(kind: Any, one: Format, text: str, request: Any) -> list[Any]:
    vocabulary = Vocabulary(one.markers)
    parser, content, calls = kind(vocabulary, request.tools), "", dict[int, list[str]]()
    pieces = re.findall("|".join([*map(re.escape, one.markers), "(?s:.)"]), text)
    ids = [vocabulary.ids.get(piece, 0) for piece in pieces] if one.parser.startswith("deepseek") else []
    deltas, before = [], ""
    for at, piece in enumerate(pieces):
        known = (ids[:at], ids[: at + 1], ids[at : at + 1])
        deltas.append(parser.extract_tool_calls_streaming(before, before + piece, piece, *known, request))
        before += piece
    if hasattr(parser, "finish_streaming"):
        deltas.append(parser.finish_streaming())
    for delta in deltas:
        if delta is None:
            continue
        content += delta.content or ""
        for call in delta.tool_calls:
            known_call = calls.setdefault(call.index, ["", ""])
            known_call[0] = call.function.name or known_call[0]
            known_call[1] += call.function.arguments or ""
    return [content, list(calls.values())]


if __name__ == "__main__":
    main()
