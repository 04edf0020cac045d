"""The benchmark of chat templates runs and counts correctly."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import chat_templates


def test_it_prints_a_line_for_each_number_of_streams(capsys: pytest.CaptureFixture[str]) -> None:
    template = Path(chat_templates.CHATML)
    asyncio.run(chat_templates.measure(argparse.Namespace(template=template, chars=10, streams=[1, 4], renders=40)))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [row["streams"] for row in rows] == [1, 4]
    assert all(row["cpu_us"] > 0 and row["clock_us"] > 0 for row in rows)
