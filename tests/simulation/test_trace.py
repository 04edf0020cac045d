"""Traces in the published formats, and descriptions of a load."""

from pathlib import Path

import pytest

from simulation.trace import TraceRequest, poisson, prompt_of, read_trace
from wire.errors import ConfigError

_MOONCAKE = '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [46, 47]}\n'
_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (_MOONCAKE, [TraceRequest(0.0, 6758, 500, (46, 47))]),
        (
            _MOONCAKE + '\n{"timestamp": 1500, "input_length": 1, "output_length": 2}\n',
            [TraceRequest(0.0, 1, 2), TraceRequest(1.5, 6758, 500, (46, 47))],
        ),
        (
            _HEADER + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,10,3,13,API log\n",
            [TraceRequest(0.0, 472, 18), TraceRequest(40.5, 10, 3)],
        ),
        (  # a failed request has no answer
            _HEADER + "5,ChatGPT,472,0,472,API log\n6,ChatGPT,1,1,2,API log\n",
            [TraceRequest(0.0, 1, 1)],
        ),
    ],
    ids=["mooncake", "by arrival", "burstgpt", "a failed request"],
)
def test_a_published_trace_is_read_by_arrival(tmp_path: Path, text: str, requests: list[TraceRequest]) -> None:
    file = tmp_path / "trace"
    file.write_text(text, encoding="utf-8")

    assert read_trace(file) == requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither JSON lines nor CSV with the columns Timestamp, Request tokens, Response tokens"),
        ("a,b\n1,2\n", "neither JSON lines nor CSV"),
        (_HEADER, "no request with output tokens"),
        ('{"timestamp": 1}\n', "line 1: input_length is None, not a number"),
        (_MOONCAKE + "[]\n", "line 2 is not a JSON object"),
        (_MOONCAKE + "{\n", "line 2 is not a JSON object"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 2}', "line 1: input_length is -5"),
        ('{"timestamp": 1, "input_length": NaN, "output_length": 2}', "line 1: input_length is nan"),
        (_MOONCAKE.replace("46", '"a"'), "line 1: hash_ids is not a list of numbers"),
        (_MOONCAKE.replace("[46, 47]", "7"), "line 1: hash_ids is not a list of numbers"),
        (_HEADER + "5,ChatGPT,many,18,490,API log\n", "line 2: Request tokens is 'many', not a number"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    file = tmp_path / "trace"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError) as caught:
        read_trace(file)

    assert str(caught.value).startswith(f"{file}")
    assert message in str(caught.value)


def test_prompts_with_the_same_blocks_begin_with_the_same_tokens() -> None:
    first, second = (prompt_of(i, TraceRequest(0.0, 1200, 1, blocks)) for i, blocks in enumerate([(7, 8), (7, 9)]))
    other = prompt_of(2, TraceRequest(0.0, 1200, 1))

    assert (len(first), len(second), len(other)) == (1200, 1200, 1200)
    assert first[:512] == second[:512]
    assert first[512] != second[512]
    assert other[0] != first[0]


def test_a_described_load_has_its_rate_and_is_the_same_again() -> None:
    requests = poisson(2000, 4.0, 10, 20, seed=1)

    assert requests[-1].arrival_s == pytest.approx(500, rel=0.1)
    assert requests == poisson(2000, 4.0, 10, 20, seed=1)
    assert {request.arrival_s for request in poisson(5, 0.0, 10, 20, seed=1)} == {0.0}
