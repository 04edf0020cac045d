"""Routes of operators' tools: version, load, ping."""

import asyncio
from typing import Any

import pytest

from pdserve import __version__

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
