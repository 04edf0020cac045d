"""`down` without a cluster of `pdserve up`: what serves on the default port, and what a killed one left running."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from tests.engine.tiny_models import save_tiny_tokenizer
from tests.pdserve.quiet_server import QuietHandler, serving


@contextmanager
def _server_answering(status: int, body: str) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(status, body.encode())

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, '{"ready": true, "missing": [], "instances": []}'),
        (503, '{"ready": false, "missing": ["no decode instance"], "instances": []}'),
    ],
)
def test_a_cluster_started_another_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: str
) -> None:
    with _server_answering(status, body) as url:
        monkeypatch.setattr("pdserve.down.DEFAULT_URL", url)
        assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out == (
        f"nothing was stopped: no cluster of `pdserve up` runs in {tmp_path}. The scheduler at {url} was started "
        "otherwise: stop its processes yourself, or pass its run folder with --run-dir\n"
    )


@pytest.mark.parametrize(("status", "body"), [(404, ""), (200, "[]"), (200, "<html>"), (403, '{"error": "no"}')])
def test_a_foreign_server_is_not_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: str
) -> None:
    with _server_answering(status, body) as url:
        monkeypatch.setattr("pdserve.down.DEFAULT_URL", url)
        assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out == "no cluster is running here\n"


def test_a_silent_port_is_not_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdserve.down.DEFAULT_URL", "http://127.0.0.1:1")

    assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out == "no cluster is running here\n"


@contextmanager
def _left_by_a_worker(folder: RunFolder, output: str) -> Iterator[int]:
    """Kill the server of a worker, whose supervisor is gone; yield its engine, which writes to `output`, as a pidfd."""
    log = folder.log("decode-0")
    log.parent.mkdir(parents=True)
    script = f"sleep 300 >{output} 2>/dev/null & echo $! >&2; exec sleep 300"
    with (
        log.open("w") as shared,
        subprocess.Popen(
            ["sh", "-c", script], stdout=shared, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as server,
    ):
        assert server.stderr is not None
        engine = os.pidfd_open(int(server.stderr.readline()))
        try:
            record = ProcessRecord("decode-0", "decode", server.pid, start_time(server.pid) or 0, "", str(log))
            folder.write(ClusterState("http://127.0.0.1:1", "m", (record,)))
            server.kill()
            server.wait(60)
            yield engine
        finally:
            if not _has_ended(engine):
                signal.pidfd_send_signal(engine, signal.SIGKILL)
            os.close(engine)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@pytest.mark.parametrize(
    ("output", "said", "ends"),
    [
        ("&1", "stopped leftover processes of decode-0\n", True),
        ("/dev/null", "no cluster is running here\n", False),  # another process: session ids are reused
    ],
)
def test_down_ends_what_a_killed_worker_left(
    output: str, said: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("pdserve.down.DEFAULT_URL", "http://127.0.0.1:1")
    with _left_by_a_worker(RunFolder(tmp_path), output) as engine:
        assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0

        assert _has_ended(engine) is ends
    assert capsys.readouterr().out == said


def test_the_next_up_ends_what_a_killed_worker_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 512}')
    save_tiny_tokenizer(tmp_path)
    with _left_by_a_worker(RunFolder(tmp_path / "run"), "&1") as engine, socket.create_server(("", 0)) as taken:
        flags = (f"--model={tmp_path}", "--engine=fake", f"--port={taken.getsockname()[1]}")
        assert cli.main(["up", *flags, f"--run-dir={tmp_path / 'run'}"]) == 2

        assert _has_ended(engine)
    assert "stopped leftover processes of decode-0\n" in capsys.readouterr().out
