"""A cluster for each way of serving in the rows of the routes, and one in which a D dies in the middle of a request."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from processes.failpoints import VARIABLE
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import START_TIMEOUT_S, GuideCluster
from tests.conformance.conftest import serving
from tests.conformance.joined_answers import Answer, joined_answer, whole_answer
from tests.conformance.route_table import CHAT, COMPLETIONS, INVOCATIONS, TOKENS, RouteRow
from tests.faults.cluster import launcher

_SCHEDULER_FLAGS = ("--tool-call-parser=hermes", "--reasoning-parser=qwen3", "--enable-mm-embeds")
_FLAGS = (*ENGINE_FLAGS, "--no-enable-prefix-caching")
_WITHOUT_PROBES = Path(__file__).with_name("scheduler_without_probes.py")
_GENERATED, _RETRIED = "pdserve_generation_tokens_total", "pdserve_prompts_retried_total"
_POLL_S = 0.02


class RouteClient:
    """Sends rows over one way of serving."""

    def __init__(self, way: str, url: str) -> None:
        self.way = way
        self.url = url

    def streamed(self, row: RouteRow) -> Answer:
        """Return what the stream of this row joins to."""
        with_usage = row.route in (CHAT, COMPLETIONS, INVOCATIONS, TOKENS)
        usage = {"stream_options": {"include_usage": True}} if with_usage else {}
        return joined_answer(row.route, self._post(row, {"stream": True} | usage).text)

    def whole(self, row: RouteRow) -> Answer:
        """Return the answer that is no stream; one in the background is polled."""
        body = self._post(row, {}).json()
        deadline = time.monotonic() + START_TIMEOUT_S
        while body.get("status") in ("queued", "in_progress"):
            assert time.monotonic() < deadline, body
            time.sleep(_POLL_S)
            body = httpx.get(f"{self.url}{row.route}/{body['id']}", timeout=300, trust_env=False).json()
        return whole_answer(row.route, body)

    def _post(self, row: RouteRow, fields: Mapping[str, Any]) -> httpx.Response:
        headers = {"x-request-id": f"row-{row.name}"}  # ids follow from it
        with httpx.Client(base_url=self.url, timeout=300, trust_env=False) as http:
            response = http.post(row.route, json={"model": "tiny", **row.body, **fields}, headers=headers)
        assert response.status_code == 200, response.text
        return response


class KillingClient(RouteClient):
    """Sends rows to a cluster whose first D is killed at a token of the row, and restarted before the next."""

    def __init__(self, cluster: GuideCluster) -> None:
        super().__init__("killed", cluster.client.base_url)
        self._cluster = cluster

    def streamed(self, row: RouteRow) -> Answer:
        """Return what the stream of this row joins to."""
        return self._killed(super().streamed, row)

    def whole(self, row: RouteRow) -> Answer:
        """Return the answer that is no stream."""
        return super().whole(row) if row.killed_at is None else self._killed(super().whole, row)

    def _killed(self, send: Callable[[RouteRow], Answer], row: RouteRow) -> Answer:
        """D waits at the token, which it never sends, and is killed once the scheduler has received those before."""
        cluster = self._cluster
        process = cluster.start("decode-0", env={VARIABLE: f"decode.token=delay:{START_TIMEOUT_S}@{row.killed_at}"})
        cluster.wait_living()
        num_before, num_retried = self._count(_GENERATED), self._count(_RETRIED)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, row)
            try:
                self._wait(lambda: " failpoint " in process.log or sent.done())
                self._wait(lambda: self._count(_GENERATED) >= num_before + (row.killed_at or 0) or sent.done())
            finally:
                cluster.kill("decode-0")
            answer = sent.result(START_TIMEOUT_S)
        assert self._count(_RETRIED) > num_retried, "the other D served it"
        return answer

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            for name, process in self._cluster.processes.items():
                assert process.running, f"{name} ended:\n{process.log}"
            assert time.monotonic() < deadline, {name: one.log for name, one in self._cluster.processes.items()}
            time.sleep(_POLL_S)

    def _count(self, name: str) -> float:
        (sample,) = self._cluster.gauge(name)
        return sample.value


@contextlib.contextmanager
def clients_of(way: str, model: Path, folder: Path, *more: str) -> Iterator[RouteClient]:
    """Start a cluster that serves in this way, with `more` flags of its scheduler; yield its client."""
    scheduler_flags = (*_SCHEDULER_FLAGS, f"--responses-store={folder / 'responses'}", *more)
    if way == "combined":
        with serving(model, folder, (*scheduler_flags, _FLAGS[-1])) as url:
            yield RouteClient(way, url)
        return
    decode = ("6", "7") if way == "killed" else ("6",)
    flags = (*_FLAGS, "--kv-transport=tcp") if way == "tcp" else _FLAGS
    with GuideCluster(folder, model, prefill=("4",), decode=decode, flags=flags) as cluster:
        if way == "killed":
            environment = {"PDSERVE_PYTHON": launcher(folder, _WITHOUT_PROBES)}
            cluster.start("prefill-0", "decode-1")
            cluster.start("scheduler", env=environment, flags=scheduler_flags)
            cluster.wait_ready()
            yield KillingClient(cluster)
        else:
            cluster.start(*cluster.names)
            cluster.start("scheduler", flags=scheduler_flags)
            cluster.wait_ready()
            yield RouteClient(way, cluster.client.base_url)
        cluster.wait_idle()
