"""The benchmark of tool calls measures every format, whose answers it reads as calls."""

from pathlib import Path

import pytest

from benchmarks.tool_calls import CALLS, grammar_lines, parser_lines
from scheduler.reasoning.formats import REASONING_FORMATS
from scheduler.tools.call_reader import StepParser
from scheduler.tools.parsers.registry import CALL_FORMATS
from tests.engine.tiny_models import save_tiny_tokenizer


def test_every_parser_is_measured() -> None:
    lines = list(parser_lines(200))

    measured = {line["format"] for line in lines if "format" in line}
    assert {CALL_FORMATS[name] for name in measured} == set(CALL_FORMATS.values())
    assert [line["thinking"] for line in lines[len(CALLS) :]] == list(REASONING_FORMATS)
    assert all(cost > 0 for line in lines for cost in line.values() if isinstance(cost, float))


@pytest.mark.parametrize("name", CALLS)
def test_its_answers_are_calls(name: str) -> None:
    parser = StepParser(CALL_FORMATS[name].steps, {"f": {"properties": {"city": {"type": "string"}}}})
    deltas = [*parser.push(CALLS[name] % "Paris").calls, *parser.flush().calls]

    assert deltas[0].name == "f"
    assert "".join(one.arguments for one in deltas).replace(" ", "") == '{"city":"Paris"}'


def test_a_choice_of_tools_is_compiled(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    (line,) = grammar_lines(tmp_path / "tokenizer.json", [2])

    assert line["tools"] == 2
    assert line.keys() == {"tools", "bytes", "compiled_ms", "cached_ms"}
