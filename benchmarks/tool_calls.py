"""The cost of tool calls: CPU time for each token of an answer, and time to compile a choice of many tools.

    python -P benchmarks/tool_calls.py
    python -P benchmarks/tool_calls.py --tokens 20000 --tools 1 64 --tokenizer MODEL/tokenizer.json

The parser of each format reads answers in pieces of four characters, about a token each: `content`, many `calls`, one
call with a `long` argument, and incomplete markers (`begun`); the parser of each reasoning format reads `thinking`. The
script prints a line for each format, in microseconds per token. With `--tokenizer`, it prints a line for each number of
tools with ten arguments each: the milliseconds from `tool_choice: required` to a compiled grammar, after another
grammar was compiled.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.grammar.store import GrammarStore
from engine.grammar.tokenizer_file import TokenizerFile
from scheduler.reasoning.formats import REASONING_FORMATS
from scheduler.reasoning.parser import ReasoningParser
from scheduler.tools.call_reader import StepParser
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.forced import forced_schema
from scheduler.tools.parsers.registry import CALL_FORMATS
from wire.types import StructuredOutput

PIECE_CHARS = 4
_JSON = '{"city": "%s"}'
CALLS = {
    "hermes": f'<tool_call>{{"name": "f", "arguments": {_JSON}}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": f'<|python_tag|>{{"name": "f", "parameters": {_JSON}}}; ',
    "pythonic": "[f(city='%s')]",
    "mistral": f"[TOOL_CALLS]f[ARGS]{_JSON}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    f"{_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    f"{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{_JSON}<|call|><|start|>assistant",
}
"""One call in each format; `%s` is its argument."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of each answer")
    parser.add_argument("--tools", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, for grammars")
    args = parser.parse_args()
    for line in parser_lines(args.tokens):
        print(json.dumps(line))
    if args.tokenizer is not None:
        for line in grammar_lines(args.tokenizer, args.tools):
            print(json.dumps(line))


def parser_lines(num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of each format, in microseconds a token."""
    schemas = {"f": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for name in CALLS:
        costs = {
            shape: _us_per_token(StepParser(CALL_FORMATS[name].steps, schemas), text)
            for shape, text in _answers(name, num_tokens * PIECE_CHARS).items()
        }
        yield {"format": name, **costs}
    for name, text_format in REASONING_FORMATS.items():
        answer = text_format.starts[0] + _filled("Think < twice. ", num_tokens * PIECE_CHARS)
        yield {"thinking": name, "us": _us_per_token(ReasoningParser(text_format, text_format.begin), answer)}


def grammar_lines(tokenizer: Path, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the time to compile the choice of each number of tools, the first time and from the cache."""
    size = len(json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"])
    with GrammarStore(TokenizerFile(str(tokenizer), (), size)) as store:
        store.prepare(_required(1, "warm")).result(120)
        for count in counts:
            option = _required(count, "tool")
            times = [_prepare_ms(store, option) for _ in range(2)]
            yield {"tools": count, "bytes": len(option.value), "compiled_ms": times[0], "cached_ms": times[1]}


def _answers(name: str, num_chars: int) -> dict[str, str]:
    marker = (*CALL_FORMATS[name].markers, "[f(")[0]
    return {
        "content": _filled("It is warm in <b>Paris</b>, [1] and {2}. ", num_chars),
        "calls": _filled(CALLS[name] % "Paris", num_chars),
        "long": CALLS[name] % _filled("if a < b then c > d ", num_chars),
        "begun": _filled(marker[:-1], num_chars),
    }


def _filled(text: str, num_chars: int) -> str:
    return (text * (num_chars // len(text) + 1))[:num_chars]


def _us_per_token(parser: StepParser | ReasoningParser, text: str) -> float:
    """Return the CPU time of a token."""
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    begin = time.process_time()
    for piece in pieces:
        parser.push(piece)
    parser.flush()
    return round((time.process_time() - begin) / len(pieces) * 1e6, 2)


def _required(count: int, prefix: str) -> StructuredOutput:
    """Return the constraint of a choice of `count` tools, each with ten arguments of several types."""
    types: tuple[dict[str, Any], ...] = (
        {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["celsius", "kelvin"]},
        {"type": "array", "items": {"type": "number"}},
    )  # fmt: skip
    properties = {f"{prefix}_argument_{at}": types[at % len(types)] for at in range(10)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:5]}
    tools = tuple(
        {"type": "function", "function": {"name": f"{prefix}_{at}", "parameters": schema}} for at in range(count)
    )
    return StructuredOutput("json", json.dumps(forced_schema(ToolChoice(ChoiceMode.REQUIRED, tools))))


def _prepare_ms(store: GrammarStore, option: StructuredOutput) -> float:
    begin = time.perf_counter()
    store.prepare(option).result(120)
    return round((time.perf_counter() - begin) * 1e3, 1)


if __name__ == "__main__":
    main()
