"""What a pod does before its instance is stopped: it waits until its work is done."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ranktable_tools.kube.command_line import main
from ranktable_tools.kube.drain import drain
from tests.deploy.slept_clock import SleptClock
from wire.load import LOADS


class _Metrics(ThreadingHTTPServer):
    """An instance's /metrics; each answer has the next number of running sequences."""

    daemon_threads = True
    running: Iterator[int]


class _Handler(BaseHTTPRequestHandler):
    server: _Metrics

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        running = next(self.server.running)
        text = f"# TYPE x gauge\npdserve_instance_running {running}.0\npdserve_instance_waiting 0.0\nx 7.0\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def metrics() -> Iterator[_Metrics]:
    server = _Metrics(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=300)
    server.server_close()


def _drain(server: _Metrics, clock: SleptClock, settle_s: float = 0.0) -> str:
    port = server.server_address[1]
    return drain("127.0.0.1", port, settle_s=settle_s, timeout_s=60.0, clock=clock, sleep=clock.sleep)


def test_it_ends_with_the_last_prompt(metrics: _Metrics) -> None:
    metrics.running, clock = iter([3, 2, 1, 0]), SleptClock()

    assert _drain(metrics, clock) == "no work is left, after 2 s"


def test_an_idle_instance_stays_until_the_scheduler_has_the_table(metrics: _Metrics) -> None:
    metrics.running, clock = iter([0, 0, 1, *[0] * 100]), SleptClock()

    assert _drain(metrics, clock, settle_s=10.0) == "no work is left, after 10 s"


def test_work_that_does_not_end_is_left_at_the_deadline(metrics: _Metrics) -> None:
    metrics.running, clock = iter([5] * 1000), SleptClock()

    assert _drain(metrics, clock).startswith("prompts left after 60 s: 5; they end")


def test_an_instance_that_has_ended_is_not_waited_for(metrics: _Metrics) -> None:
    clock = SleptClock()

    assert drain("127.0.0.1", 1, settle_s=10, timeout_s=60, clock=clock, sleep=clock.sleep).startswith(
        "the instance has exited"
    )


def test_the_address_is_the_pods_own(
    metrics: _Metrics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.running = iter([0])
    flags = ["drain", "--http-port", str(metrics.server_address[1]), "--settle", "0"]

    monkeypatch.delenv("POD_IP", raising=False)
    assert main(flags) == 2
    monkeypatch.setenv("POD_IP", "127.0.0.1")
    assert main(flags) == 0

    captured = capsys.readouterr()
    assert (captured.out, "POD_IP is not set" in captured.err) == ("no work is left, after 0 s\n", True)


def test_the_metrics_are_those_an_instance_shows() -> None:
    assert {"running", "waiting", "held_prompts"} <= {row.instance.name for row in LOADS if row.instance}
