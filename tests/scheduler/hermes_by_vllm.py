"""Write what vLLM's own Hermes parser returns for generated texts, whole and character by character, as a table.

    PYTHON_OF_VLLM tests/scheduler/hermes_by_vllm.py > tests/scheduler/hermes_by_vllm.json

Run with vLLM 0.32.0. The table has facts only; the tests compare scheduler/tools/parsers/hermes.py with it.
"""

import json
import random
import sys
from typing import Any

NAMES = ("weather", "get-time", "f_1", "search")
VALUES: tuple[Any, ...] = (
    1, -2.5, True, None, "", "Paris", "東京 é 😀", 'a "quoted" \\ text', "line\nbreak", "}, ] { [", [], {},
    [1, [2, {"a": "b"}]], {"nested": {"deep": ["x", {"y": "}"}]}}, "name", '{"name": "inner", "arguments": {}}',
)  # fmt: skip
CONTENTS = ("", "", "Let me look.", "Let me look.\n", "\n\n", "1 < 2 and <tool", "<b>é</b> \n ")


def call(chance: random.Random) -> str:
    """Return one call between its markers."""
    arguments = {f"key{at}": chance.choice(VALUES) for at in range(chance.randrange(4))}
    fields: dict[str, Any] = {"name": chance.choice(NAMES), "arguments": arguments}
    ascii_only, indent = chance.random() < 0.3, chance.choice((None, None, 1))
    separators = (",", ":") if chance.random() < 0.3 else None
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent, separators=separators)
    space = chance.choice(("\n", "\n", "", " "))
    return f"<tool_call>{space}{body}{space}</tool_call>"


def texts() -> list[str]:
    """Return right texts, and some that are cut or malformed."""
    chance = random.Random(0)
    right = []
    for _ in range(60):
        calls = [call(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))]
        right.append(chance.choice(CONTENTS) + chance.choice(("\n", "")).join(calls))
    cut = [text[: chance.randrange(1, len(text))] for text in right if len(text) > 1][:30]
    malformed = [
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
    ]  # fmt: skip
    return list(dict.fromkeys([*right, *cut, *malformed]))


def main() -> None:
    """Write the table to standard output, a line for each text."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser  # type: ignore[import-not-found]

    rows = []
    for text in texts():
        whole = Hermes2ProToolParser(object()).extract_tool_calls(text, None)
        calls = [[one.function.name, one.function.arguments] for one in whole.tool_calls]
        streamed = _streamed(Hermes2ProToolParser, text)
        rows.append({"text": text, "whole": [whole.content or "", calls], "streamed": streamed})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    sys.stdout.write(f"[\n{lines}\n]\n")


def _streamed(kind: Any, text: str) -> list[Any]:
    parser, content, calls = kind(object()), "", []
    for at, sign in enumerate(text):
        delta = parser.extract_tool_calls_streaming(text[:at], text[: at + 1], sign, [], [], [], None)
        if delta is None:
            continue
        content += delta.content or ""
        for one in delta.tool_calls:
            if one.function.name is not None:
                calls.append([one.function.name, ""])
            calls[one.index][1] += one.function.arguments or ""
    return [content, calls]


if __name__ == "__main__":
    main()
