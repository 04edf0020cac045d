"""Two schedulers on the same instances: one is killed or stopped, and the other's streams do not notice."""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from pdserve.client import Client
from tests.faults.cases import ANSWER, CLOSED, ERROR
from tests.faults.cluster import PROMPT_TOKENS, FaultCluster, client_of, describe, pools_empty, until
from tests.faults.launch import LEASE_S
from tests.faults.stream_request import StreamResult, request_stream
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

OTHER = "scheduler-1"
NUM_STREAMS, LONG = 3, 440  # tokens: longer than the lease of a session
DEADLINE_S = 300.0
BLOCK_BYTES = 2048


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FaultCluster]:
    """A cluster of so many pairs, whose pools have so many blocks, and two schedulers."""
    pairs, num_blocks = request.param
    with FaultCluster(tmp_path, pairs=pairs, flags=(f"--kv-cache-memory={num_blocks * BLOCK_BYTES}",)) as cluster:
        for name in (*cluster.names, OTHER):
            cluster.start(name)
        cluster.wait_living(cluster.guide.names)
        wait_sessions(cluster)
        yield cluster


def wait_sessions(cluster: FaultCluster) -> None:
    """Wait until the second scheduler has a session with every instance."""

    def num_living() -> int:
        try:
            samples = Client(url_of(cluster)).metrics()
        except Unavailable:
            return 0
        return sum(one.name == "pdserve_instance_info" and one.labels["state"] == "living" for one in samples)

    asyncio.run(
        until(lambda: num_living() == len(cluster.guide.names), time.time() + DEADLINE_S, "no session with each")
    )


def url_of(cluster: FaultCluster) -> str:
    return f"http://127.0.0.1:{cluster.guide.second_port}"


def client_of_other(cluster: FaultCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url_of(cluster), timeout=DEADLINE_S, trust_env=False)


def prompts(first: int, count: int) -> list[list[int]]:
    return [[3 + (7 * stream + 5 * i) % 300 for i in range(PROMPT_TOKENS)] for stream in range(first, first + count)]


def assert_answers(cluster: FaultCluster, asked: list[list[int]], results: list[StreamResult], count: int) -> None:
    for prompt, one in zip(asked, results, strict=True):
        assert (one.outcome, len(one.tokens)) == (ANSWER, count), describe(results)
        assert cluster.explains(prompt, one.tokens), describe(results)


async def lose_other(cluster: FaultCluster, number: signal.Signals) -> None:
    """Kill or stop the second scheduler while both have streams, and check what both sets of clients receive."""
    asked, asked_of_other = prompts(0, NUM_STREAMS), prompts(50, NUM_STREAMS)
    starved_s = cluster.starved_s(cluster.guide.names)
    async with client_of(cluster) as client, client_of_other(cluster) as other:
        began: dict[tuple[str, int], int] = {}

        def count_on(key: tuple[str, int]) -> asyncio.Task[StreamResult]:
            which, prompt = (client, asked) if key[0] == "ours" else (other, asked_of_other)
            return asyncio.create_task(
                request_stream(which, prompt[key[1]], LONG, lambda count: began.__setitem__(key, count))
            )

        ours = [count_on(("ours", i)) for i in range(NUM_STREAMS)]
        others = [count_on(("others", i)) for i in range(NUM_STREAMS)]
        await until(lambda: len(began) == 2 * NUM_STREAMS, time.time() + DEADLINE_S, f"not all began: {began}")
        lost_at = time.time()
        process = cluster.guide.processes[OTHER]
        process.send(number)
        results = await asyncio.gather(*ours)
        assert_answers(cluster, asked, results, LONG)
        await pools_empty(cluster, cluster.guide.names, max(lost_at, time.time() - LEASE_S), starved_s)
        if number == signal.SIGKILL:
            assert {one.outcome for one in await asyncio.gather(*others)} == {CLOSED}
        else:
            assert cluster.is_stopped(OTHER)
            process.send(signal.SIGCONT)  # its sessions have ended, and their prompts with them
            for prompt, one in zip(asked_of_other, await asyncio.gather(*others), strict=True):
                assert one.outcome in (ANSWER, ERROR), one
                assert cluster.explains(prompt, one.tokens), one
            await pools_empty(cluster, cluster.guide.names, time.time(), starved_s)
    assert "prompt_retried" not in cluster.log("scheduler")
    assert "instance_lost" not in cluster.log("scheduler")


@pytest.mark.often("kill-1P1D")
@pytest.mark.parametrize(
    "cluster", [pytest.param((1, 1000), id="1P1D"), pytest.param((2, 1000), id="2P2D")], indirect=True
)
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, id="kill"), pytest.param(signal.SIGSTOP, id="stop")]
)  # fmt: skip
def test_streams_of_one_scheduler_survive_the_loss_of_the_other(cluster: FaultCluster, number: signal.Signals) -> None:
    asyncio.run(lose_other(cluster, number))
    if number == signal.SIGKILL:
        cluster.bury(OTHER)
        cluster.start(OTHER)
    wait_sessions(cluster)

    async def ask() -> list[StreamResult]:
        async with client_of_other(cluster) as other:
            return [await request_stream(other, prompt, 8) for prompt in prompts(0, 2)]

    assert_answers(cluster, prompts(0, 2), asyncio.run(ask()), 8)


async def repeat_after_death(cluster: FaultCluster, headers: Sequence[dict[str, str]]) -> int:
    """Kill the second scheduler while it decodes, repeat its requests at the first; return how many ran twice."""
    asked = prompts(0, len(headers))
    fields = {"model": "tiny", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}

    def num_admitted() -> int:
        return cluster.log("decode-0").count(" kv_received ")

    async def post(client: httpx.AsyncClient, number: int) -> httpx.Response:
        body = {**fields, "prompt": asked[number]}
        return await client.post("/v1/completions", json=body, headers=headers[number])

    async with client_of(cluster) as client, client_of_other(cluster) as other:
        before, everyone = num_admitted(), range(len(asked))
        first = [asyncio.create_task(post(other, number)) for number in everyone]
        await until(lambda: num_admitted() == before + len(asked), time.time() + DEADLINE_S, "not all are decoded")
        cluster.guide.processes[OTHER].send(signal.SIGKILL)
        for cut in await asyncio.gather(*first, return_exceptions=True):
            assert isinstance(cut, httpx.TransportError), cut
        answers = await asyncio.gather(*(post(client, number) for number in everyone))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.text
        body = answer.json()
        words = body["choices"][0]["text"].split()
        assert (len(words), body["usage"]["completion_tokens"]) == (LONG, LONG)
        assert cluster.explains(prompt, words)
    return num_admitted() - before - len(asked)


@pytest.mark.parametrize("cluster", [pytest.param((1, 1000), id="1P1D")], indirect=True)
@pytest.mark.parametrize(
    "has_keys", [pytest.param(True, id="keys"), pytest.param(False, id="no-keys", marks=pytest.mark.long)]
)  # fmt: skip
def test_repeated_requests_run_twice_only_without_a_key(cluster: FaultCluster, *, has_keys: bool) -> None:
    headers = [{"Idempotency-Key": f"order-{number}"} if has_keys else {} for number in range(8)]

    assert asyncio.run(repeat_after_death(cluster, headers)) == (0 if has_keys else len(headers))
    cluster.bury(OTHER)
    assert cluster.ledger()["run_again"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "cluster", [pytest.param((1, 24), id="1P1D"), pytest.param((2, 12), id="2P2D")], indirect=True
)  # fmt: skip
def test_two_schedulers_that_race_for_a_small_pool_lose_nothing(cluster: FaultCluster) -> None:
    asked = prompts(0, 60)

    async def load() -> list[StreamResult]:
        turn = asyncio.Semaphore(24)

        async def one(client: httpx.AsyncClient, prompt: list[int]) -> StreamResult:
            async with turn:
                return await request_stream(client, prompt, 16)

        async with client_of(cluster) as client, client_of_other(cluster) as other, asyncio.timeout(DEADLINE_S):
            runs = [[one(which, prompt) for prompt in asked] for which in (client, other)]
            return await asyncio.gather(*runs[0], *runs[1])

    results = asyncio.run(load())

    assert_answers(cluster, asked + asked, results, 16)
    refused = [cluster.log(name).count("no_capacity") for name in ("scheduler", OTHER)]
    assert sum(refused) > 0, "the pools are too large for a race"
    asyncio.run(pools_empty(cluster, cluster.guide.names, time.time(), cluster.starved_s(cluster.guide.names)))
