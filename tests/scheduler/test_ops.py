"""Routes of operators' tools: version, load, ping."""

import asyncio
from typing import Any

import pytest

from pdserve import __version__
from scheduler.finished_requests import FinishedRequests
from scheduler.view import ClusterView, InstanceView
from wire.errors import Overloaded
from wire.load import LoadSnapshot
from wire.types import Role

pytestmark = pytest.mark.anyio


async def test_version_is_that_of_the_package(serve: Any) -> None:
    async with serve() as served:
        response = await served.client.get("/version")

        assert (response.status_code, response.json()) == (200, {"version": __version__})


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_answers_as_health(serve: Any, method: str) -> None:
    async with serve() as served:
        response = await served.client.request(method, "/ping")

        assert (response.status_code, response.json()) == (200, {"status": "ok"})

    async with serve(health=lambda: "the engine is stuck") as served:
        response = await served.client.request(method, "/ping")

        assert (response.status_code, response.json()) == (503, {"status": "the engine is stuck"})


async def test_load_counts_the_requests_in_flight(serve: Any) -> None:
    async with serve() as served:
        assert (await served.client.get("/load")).json() == {"server_load": 0}

        served.dispatcher.hold_after = 1
        body = {"model": served.model, "prompt": "hello"}
        waiting = asyncio.create_task(served.client.post("/v1/completions", json=body))
        await asyncio.wait_for(served.dispatcher.held.wait(), 10)
        assert (await served.client.get("/load")).json() == {"server_load": 1}
        served.dispatcher.released.set()
        assert (await waiting).status_code == 200

        assert (await served.client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "report"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=7"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 7}}'),
        ("BIN", None),
        (None, None),
    ],
)
async def test_an_answer_reports_the_load_where_its_request_wants_it(
    serve: Any, form: str | None, report: str | None, stream: bool
) -> None:
    loads = (LoadSnapshot(blocks_total=100, blocks_used=42, blocks_probe=2, waiting=3), LoadSnapshot(blocks_total=60))
    instances = tuple(
        InstanceView(at, "", Role.PREFILL, "", "", "", None, one) for at, one in enumerate((*loads, None))
    )
    async with serve() as served:
        served.context.metrics.view = lambda: ClusterView(True, instances, FinishedRequests(), 4, 40)
        headers = {} if form is None else {"Endpoint-Load-Metrics-Format": form}
        body = {"model": served.model, "prompt": "hello", "stream": stream}

        answers = [await served.client.post("/v1/completions", json=body, headers=headers)]
        served.dispatcher.refuse_with = Overloaded("full")
        answers.append(await served.client.post("/v1/completions", json=body, headers=headers))
        operators = await served.client.get("/health", headers=headers)

    assert [answer.status_code for answer in answers] == [200, 429]
    assert [answer.headers.get("endpoint-load-metrics") for answer in answers] == [report, report]
    assert "endpoint-load-metrics" not in operators.headers


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics"])
@pytest.mark.parametrize(
    ("flag", "sent", "shown"),
    [(False, None, None), (False, "mine", "mine"), (True, None, "req-"), (True, "mine", "mine")],
)
async def test_probes_have_an_id_where_it_is_wanted(
    serve: Any, path: str, flag: bool, sent: str | None, shown: str | None
) -> None:
    async with serve(enable_request_id_headers=flag) as served:
        answer = await served.client.get(path, headers={} if sent is None else {"x-request-id": sent})

    assert (answer.headers.get("x-request-id") or "")[:4] == (shown or "")
