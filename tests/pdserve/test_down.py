"""`down` without a cluster of `pdserve up`: it reports what serves on the default port."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve import cli
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
        f"nothing was stopped: no cluster of `pdserve up` runs in {tmp_path}; the one at {url} was started otherwise: "
        "stop its processes yourself, or pass its folder with --run-dir\n"
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
