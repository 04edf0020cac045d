"""The benchmark of routers: how its client evaluates arrivals, what its workers send, and that it runs."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import route
from benchmarks.front_door.http_workers import Worker
from benchmarks.front_door.paced_load import Figures
from benchmarks.route_stages import shares

ROOT = Path(__file__).resolve().parents[2]


def test_a_lag_is_what_a_token_is_later_than_its_step() -> None:
    figures = Figures(0.5)
    figures.add(9.5, [9.75, 10.25, 10.5, 11.75])  # steps at 10, 10.5 and 11
    figures.add(9.5, [9.75, 10.5, 11.0, 11.5])

    report = figures.report()

    assert (report["first_p50_ms"], report["token_p50_ms"], report["token_p99_ms"]) == (250, 0, 750)


@pytest.mark.anyio
async def test_a_worker_replays_as_many_events_as_requested() -> None:
    server = await asyncio.start_server(Worker().answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    body = json.dumps({"prompt": [1, 2], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}})
    writer.write(f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 30.0)
    writer.close()
    server.close()

    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert [choice["token_ids"] for one in events for choice in one["choices"]] == [[1000], [1001], [1002]]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}


def test_a_decision_is_timed_among_all_members() -> None:
    rows = [*route.placement(num_members=10, decisions=5), *asyncio.run(route.whole_placement(10, 5))]

    assert [row["figure"] for row in rows] == [
        "decision among 10, p50", "decision among 10, p99", "prompt placed and released among 10, p50",
        "prompt placed and released among 10, p99",
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in rows)


def test_a_sample_belongs_to_the_stage_of_its_innermost_known_frame() -> None:
    stacks = [
        "run (scheduler/loop.py:17);Runner.run (asyncio/runners.py:118) 2",
        "Gate.__call__ (scheduler/api/gate.py:50);read_json (scheduler/api/read_json.py:25) 1",
        "Gate.__call__ (scheduler/api/gate.py:50);Tokens.encode (scheduler/tokens.py:50);get (re/_parser.py:5) 3",
        "Instance._read (scheduler/instances.py:217);Instance.placement_load (scheduler/instances.py:109) 2",
    ]

    assert shares(stacks) == {"tokenise": 37.5, "loop and kernel": 25.0, "place": 25.0, "validate": 12.5}


@pytest.mark.long
@pytest.mark.cluster
def test_both_paths_answer_the_client(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "route.py"), "--scale", "0.05", "--only", "cost", "latency"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)

    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["server"], row["kind"]) for row in rows if row["figure"].endswith("streams")] == [
        ("pdserve route", "request_us"), ("pdserve route", "token_us"), ("pdserve", "request_us"),
        ("pdserve", "token_us"),
    ]  # fmt: skip
    assert len(rows) == 8
