"""A batch's metrics for Prometheus, followed by those of the engine in its process."""

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from batch.backend import NO_HEADERS, Answer
from batch.runner import BatchProgress
from pdserve.batch_run.metrics import serve_metrics
from pdserve.client import parse_metrics
from wire.errors import ConfigError, Unavailable

PROGRESS = BatchProgress(total=10, done=4, errors=1, resumed=2, prompt_tokens=30, completion_tokens=20)


class Engine:
    """An `Answerer` with one metric, or none."""

    def __init__(self, page: bytes | None) -> None:
        self.page = page

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        assert (method, path) == ("GET", "/metrics")
        if self.page is None:
            raise Unavailable("it is gone")
        return Answer(200, {}, self.page)


def fetch(port: int, path: str = "/metrics") -> tuple[int, str]:
    """Fetch one page."""
    client = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with client.open(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def fetched(progress: BatchProgress | None, engine: Engine | None, path: str = "/metrics") -> tuple[int, str]:
    """Serve on a free port and fetch one page."""

    async def send() -> tuple[int, str]:
        async with serve_metrics("127.0.0.1", 0, lambda: progress, engine) as port:
            return await asyncio.to_thread(fetch, port, path)

    return asyncio.run(send())


def test_lines_and_tokens_are_counted() -> None:
    status, page = fetched(PROGRESS, None)

    assert status == 200
    assert {(one.name, *one.labels.values()): one.value for one in parse_metrics(page)} == {
        ("pdserve_batch_file_lines",): 10,
        ("pdserve_batch_lines_total", "good"): 3,
        ("pdserve_batch_lines_total", "error"): 1,
        ("pdserve_batch_tokens_total", "prompt"): 30,
        ("pdserve_batch_tokens_total", "completion"): 20,
    }


def test_engine_metrics_follow_the_batchs_own() -> None:
    status, page = fetched(PROGRESS, Engine(b"vllm:num_requests_running 3\n"))

    assert status == 200
    assert page.endswith("vllm:num_requests_running 3\n")
    assert "pdserve_batch_file_lines 10.0\n" in page


def test_an_engine_without_metrics_removes_none() -> None:
    status, page = fetched(PROGRESS, Engine(None))

    assert (status, "pdserve_batch_file_lines 10.0\n" in page) == (200, True)


class Busy(Engine):
    """An engine whose metrics are requested and that does not answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requested = asyncio.Event()

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        self.requested.set()
        await asyncio.Event().wait()
        raise AssertionError


def test_a_scrape_at_the_end_gets_the_batchs_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    async def send() -> "Future[tuple[int, str]]":
        engine = Busy()
        async with serve_metrics("127.0.0.1", 0, lambda: PROGRESS, engine) as port:
            pending = pool.submit(fetch, port)
            await engine.requested.wait()
        return pending

    with ThreadPoolExecutor(1) as pool:
        status, page = asyncio.run(send()).result(300)

    assert (status, "pdserve_batch_file_lines 10.0\n" in page) == (200, True)
    assert capfd.readouterr().err == ""


def test_before_the_first_line_no_metrics_and_other_paths_are_404() -> None:
    assert fetched(None, None) == (200, "")
    assert fetched(PROGRESS, None, "/secrets")[0] == 404


def test_a_port_in_use_is_reported() -> None:
    async def serve(port: int) -> None:
        async with serve_metrics("127.0.0.1", port, lambda: PROGRESS, None):
            pass

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            asyncio.run(serve(port))
