"""Killed instances and disconnected clients: every request ends with a message, and no block stays held."""

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.cluster

ENDING_S = 3.0
NUM_REQUESTS = 100


def _body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}


async def _stream(client: httpx.AsyncClient, started: asyncio.Event) -> str:
    """Stream one long completion to its end and return the last data line that is not [DONE]."""
    last = ""
    async with client.stream("POST", "/v1/completions", json=_body()) as response:
        if response.status_code != 200:
            return (await response.aread()).decode()
        async for line in response.aiter_lines():
            started.set()
            if line.startswith("data:") and "[DONE]" not in line:
                last = line
    return last


async def _lose(cluster: GuideCluster, victim: str) -> tuple[list[str], float]:
    """Kill `victim` while eight answers are being streamed; return how each ended and how long after the kill."""
    async with httpx.AsyncClient(base_url=cluster.client.base_url, timeout=300, trust_env=False) as client:
        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(_stream(client, event)) for event in started]
        async with asyncio.timeout(300):
            await asyncio.gather(*(event.wait() for event in started))
            cluster.kill(victim)
            killed_at = time.monotonic()
            endings = await asyncio.gather(*streams)
    return endings, time.monotonic() - killed_at


@pytest.mark.long
def test_killing_decode_ends_every_request_with_a_reason(slow_cluster: GuideCluster) -> None:
    endings, seconds = asyncio.run(_lose(slow_cluster, "decode-0"))

    assert seconds < ENDING_S
    assert all('"error"' in ending and "decode" in ending for ending in endings), endings
    _assert_survivors_are_idle(slow_cluster)


@pytest.mark.long
def test_killing_decode_during_a_seeded_answer_changes_no_token(tmp_path: Path, tiny_model: Path) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 1.1, "seed": 5}
    with GuideCluster(tmp_path, tiny_model, prefill=["4"], decode=["6", "7"], flags=ENGINE_FLAGS) as cluster:
        cluster.start("prefill-0", "decode-1", "scheduler")
        cluster.start("decode-0", env={"PDSERVE_FAILPOINTS": "decode.token=kill9@100"})
        cluster.wait_ready()
        texts: list[str] = []
        while cluster.processes["decode-0"].running:
            assert len(texts) < 50, "decode-0 never generates"
            reply = cluster.client.post("/v1/completions", body)
            assert reply.status == 200, reply.body
            texts.append(reply.json()["choices"][0]["text"])
        (retried,) = cluster.gauge("pdserve_prompts_retried_total")
        cluster.retired.append(cluster.processes.pop("decode-0"))

        assert len(set(texts)) == 1
        assert retried.value == 1
        cluster.wait_idle()


@pytest.mark.long
def test_killing_prefill_ends_requests_that_wait_for_it_with_a_reason(tmp_path: Path, slow_fake_model: Path) -> None:
    with GuideCluster(tmp_path, slow_fake_model, flags=("--engine=fake", "--prefill-chunk-size=16")) as cluster:
        cluster.up()
        endings, seconds = asyncio.run(_lose_prefill(cluster))

        assert seconds < ENDING_S
        assert all('"error"' in ending for ending in endings), endings
        _assert_survivors_are_idle(cluster)


async def _lose_prefill(cluster: GuideCluster) -> tuple[list[str], float]:
    """Kill P while it computes prompts of many chunks: none has a token yet."""
    async with httpx.AsyncClient(base_url=cluster.client.base_url, timeout=300, trust_env=False) as client:
        bodies = [{**_body(), "prompt": [5] * 480, "max_tokens": 8, "stream": False} for _ in range(8)]
        requests = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        async with asyncio.timeout(300):
            while not (await asyncio.to_thread(cluster.gauge, "pdserve_requests_inflight"))[0].value:
                pass
            cluster.kill("prefill-0")
            killed_at = time.monotonic()
            replies = await asyncio.gather(*requests)
    return [reply.text for reply in replies], time.monotonic() - killed_at


def _assert_survivors_are_idle(cluster: GuideCluster) -> None:
    """The dead instance's gauges are gone or zero, the living one holds nothing."""
    cluster.wait_idle()
    ready, words = cluster.client.get("/ready").status == 200, cluster.client.get("/ready").json()
    assert not ready
    assert words["missing"]


@pytest.mark.long
def test_a_killed_decode_instance_that_returns_serves_again(slow_cluster: GuideCluster) -> None:
    slow_cluster.kill("decode-0")

    slow_cluster.start("decode-0")
    slow_cluster.wait_ready()

    reply = slow_cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
    assert reply.status == 200, reply.body
    slow_cluster.wait_idle()


async def _one_of_many(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """Run one request; half of them disconnect after a random number of lines."""
    body = _body(prompt=[3 + number % 50] * rng.randint(1, 200), max_tokens=rng.randint(1, 60))
    leave_after = rng.randint(0, 40) if number % 2 else None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        count = 0
        async for line in response.aiter_lines():
            if leave_after is not None and count >= leave_after:
                return "left"
            assert '"error"' not in line, line
            count += 1
    return "finished"


async def _many_answers(cluster: GuideCluster) -> list[str]:
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=cluster.client.base_url, timeout=300, trust_env=False, limits=limits
    ) as client:
        return await asyncio.gather(*(_one_of_many(client, number, rng) for number in range(NUM_REQUESTS)))


@pytest.mark.covers("B.cancel.2")
def test_many_requests_half_of_them_cancelled_leave_no_block_held(fake_cluster: GuideCluster) -> None:
    endings = asyncio.run(_many_answers(fake_cluster))

    assert endings.count("finished") >= NUM_REQUESTS // 2
    fake_cluster.wait_idle()
    (inflight,) = fake_cluster.gauge("pdserve_requests_inflight")
    assert inflight.value == 0
