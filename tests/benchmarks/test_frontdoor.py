"""The front door's benchmark: what its client counts, what its table shows, and that it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import frontdoor
from benchmarks.front_door.cpu import cpu_by_thread, cpu_s
from benchmarks.front_door.load import Call, Run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "frontdoor.py"
EVENTS = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b'b\r\ndata: {"a":1}\n\n\r\n'] * 3, b"0\r\n\r\n"]


class _Socket:
    """A connection that returns the given pieces, one at a time."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def recv(self, _: int) -> bytes:
        return self.pieces.pop(0)

    def sendall(self, content: bytes) -> None:
        pass


def _call(pieces: list[bytes]) -> tuple[Call, Run]:
    run = Run({"path": "/", "model": "m", "prompt_words": 2, "max_tokens": 1, "stream": True})
    call = Call.__new__(Call)
    call._run, call.socket = run, _Socket(pieces)  # type: ignore[assignment]
    call.send()
    return call, run


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_event_is_counted_once_however_the_bytes_are_cut(size: int) -> None:
    head, body = EVENTS[0], b"".join(EVENTS[1:])
    call, run = _call([head, *(body[at : at + size] for at in range(0, len(body), size))])

    while not call.receive():
        pass

    assert (run.num_events, run.failures, len(run.first_bytes_s)) == (3, [], 1)
    assert call.socket.pieces == []  # type: ignore[attr-defined]


def test_a_response_with_a_length_ends_with_its_last_byte() -> None:
    call, run = _call([b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nab", b"cd"])

    assert [call.receive(), call.receive()] == [False, True]
    assert len(run.failures) == 1


def test_the_table_has_a_column_for_each_server(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"server": "a", "figure": "f", "value": 1.5, "goal": 2}, {"server": "b", "figure": "g", "value": 3}]

    frontdoor.print_table(rows)

    assert "| f | 2 | 1.5 | - |\n| g | - | - | 3 |" in capsys.readouterr().out


def test_cpu_time_is_split_by_thread() -> None:
    reported = cpu_by_thread(os.getpid())

    assert reported["loop"] > 0
    assert cpu_s(os.getpid()) >= sum(reported.values())


@pytest.mark.long
@pytest.mark.cluster
def test_the_real_front_door_answers_the_fake_instances_client(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--scale", "0.02", "--only", "request-1", "stream-1", "first-byte"]

    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, errors = running.communicate(timeout=300)
        finally:
            running.terminate()

    assert running.returncode == 0, errors
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert all(row["value"] > 0 for row in rows if row.get("kind"))
    assert len(rows) == 5
    assert all(row["threads_us"]["loop"] > 0 for row in rows if row.get("kind") in ("request_us", "token_us"))
