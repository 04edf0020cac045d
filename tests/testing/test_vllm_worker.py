"""The fake vLLM worker alone: its tokens can be computed, and each switch causes the failure that it names."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from testing.engine.fake_model import FakeConfig, expected_tokens
from testing.vllm_worker.faults import Fault
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker
from tests.testing.vllm_client import LIMIT, Answer, WorkerClient
from wire.types import SamplingParams

ROOT = Path(__file__).parents[2]
FAKE = FakeConfig(num_layers=1, step_seconds=0.001)
PROMPT = list(range(11, 46))
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "ignore_eos": True}


class Cluster:
    """A prefill and a decode worker with a client."""

    def __init__(self, prefill: FakeVllmWorker, decode: FakeVllmWorker, client: WorkerClient) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client

    async def reference(self) -> dict[str, Any]:
        answer = await self.client.prefill(self.prefill.url, **GREEDY)
        return dict(answer.body["kv_transfer_params"])

    async def decoded(self, reference: dict[str, Any], **fields: Any) -> Answer:
        return await self.client.stream(self.decode.url, **GREEDY | fields, kv_transfer_params=reference)


@asynccontextmanager
async def cluster(prefill: WorkerSettings, decode: WorkerSettings) -> AsyncIterator[Cluster]:
    workers = FakeVllmWorker(prefill), FakeVllmWorker(decode)
    async with aiohttp.ClientSession() as session:
        try:
            for worker in workers:
                await worker.start()
            yield Cluster(*workers, WorkerClient(session, "model", {}))
        finally:
            for worker in workers:
                await worker.stop()


def run(
    test: Callable[[Cluster], Awaitable[None]],
    prefill: WorkerSettings | None = None,
    decode: WorkerSettings | None = None,
) -> None:
    async def main() -> None:
        async with cluster(prefill or WorkerSettings(fake=FAKE), decode or WorkerSettings(fake=FAKE)) as made:
            await test(made)

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 7}, {"n": 2, "temperature": 0.5, "seed": 3}])
def test_the_tokens_show_which_worker_computed_what(fields: dict[str, Any]) -> None:
    async def test(made: Cluster) -> None:
        answer = await made.client.hand_off(made.prefill.url, made.decode.url, **GREEDY | fields)

        body = GREEDY | fields
        params = SamplingParams(5, temperature=body["temperature"], seed=body.get("seed", 0), n=body.get("n", 1))
        for sequence in range(params.n):
            assert answer.tokens_of(sequence) == list(
                expected_tokens(FAKE, PROMPT, params, count=5, salts=[1] * len(PROMPT) + [2], sequence=sequence)
            )

    run(test, *(WorkerSettings(fake=replace(FAKE, salt=salt)) for salt in (1, 2)))


FAULTS: list[tuple[Fault, int | None, int, bool]] = [
    # fault, status (None: no answer), tokens delivered, whether the stream broke off
    (Fault("drop", "before"), None, 0, False),
    (Fault("die", "before"), None, 0, False),
    (Fault("html", "before"), 200, 0, False),
    (Fault("unauthorized", "before"), 401, 0, False),
    (Fault("empty", "before"), 200, 0, False),
    (Fault("error", "before"), 500, 0, False),
    (Fault("drop", "during", after_tokens=2), 200, 2, True),
    (Fault("die", "during", after_tokens=2), 200, 2, True),
    (Fault("cut", "during", after_tokens=2), 200, 2, False),
    (Fault("error", "during", after_tokens=2), 200, 2, False),
    (Fault("drop", "after"), 200, 5, True),
    (Fault("cut", "after"), 200, 5, False),
]


@pytest.mark.parametrize(("fault", "status", "count", "breaks"), FAULTS, ids=lambda value: str(value)[:50])
def test_a_fault_meets_one_request(fault: Fault, status: int | None, count: int, breaks: bool) -> None:
    async def test(made: Cluster) -> None:
        made.decode.faults.add(fault)
        try:
            answer = await made.client.stream(made.decode.url, **GREEDY)
        except aiohttp.ClientError:
            answer = Answer(0)

        assert answer.status == (status or 0)
        assert len(answer.token_ids) == count
        assert answer.is_cut == breaks
        assert answer.is_done == (fault.action == "error" and fault.point == "during")
        if fault.action != "die":
            assert (await made.client.stream(made.decode.url, **GREEDY)).is_done

    run(test)


@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_hanging_worker_is_left_by_its_client(point: Any) -> None:
    async def test(made: Cluster) -> None:
        made.decode.faults.add(Fault("hang", point, after_tokens=1))
        hanging = asyncio.create_task(made.client.stream(made.decode.url, **GREEDY))
        if point == "during":  # it keeps its place and its blocks
            await made.client.until(made.decode.url, "vllm:generation_tokens_total", lambda value: value == 2)
            assert await made.client.gauge(made.decode.url, "vllm:num_requests_running") == 1
            assert await made.client.gauge(made.decode.url, "vllm:kv_cache_usage_perc") > 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hanging, 0.3)

        await made.client.until(made.decode.url, "vllm:num_requests_running", lambda value: value == 0)
        assert await made.client.gauge(made.decode.url, "vllm:kv_cache_usage_perc") == 0

    run(test)


def test_a_fault_may_be_of_one_leg() -> None:
    async def test(made: Cluster) -> None:
        for worker in (made.prefill, made.decode):
            worker.faults.add(Fault("error", leg="prefill"))
        refused = await made.client.prefill(made.prefill.url, **GREEDY)

        assert refused.status == 500
        assert (await made.client.hand_off(made.prefill.url, made.decode.url, **GREEDY)).is_done

    run(test)


async def used_twice(made: Cluster) -> dict[str, Any]:
    reference = await made.reference()
    await made.decoded(reference)
    return reference


async def expired(made: Cluster) -> dict[str, Any]:
    reference = await made.reference()
    await made.client.until(made.prefill.url, "vllm:nixl_num_kv_expired_reqs_total", lambda value: value == 1)
    return reference


async def of_no_request(made: Cluster) -> dict[str, Any]:
    return await made.reference() | {"remote_request_id": "nobody"}


async def after_a_restart(made: Cluster) -> dict[str, Any]:
    reference = await made.reference()
    await made.prefill.stop()
    await made.prefill.start()
    return reference


async def of_a_dead_worker(made: Cluster) -> dict[str, Any]:
    reference = await made.reference()
    await made.prefill.stop()
    return reference


Stale = Callable[[Cluster], Awaitable[dict[str, Any]]]


@pytest.mark.parametrize("stale", [after_a_restart, of_a_dead_worker])
def test_a_reference_of_a_lost_worker_fails(stale: Stale) -> None:
    async def test(made: Cluster) -> None:
        answer = await made.decoded(await stale(made))

        assert (answer.status, answer.token_ids, answer.error["code"]) == (200, [], 500)

    run(test)


@pytest.mark.parametrize("stale", [used_twice, expired, of_no_request])
@pytest.mark.parametrize("wrong_200", [False, True])
def test_a_stale_reference_reads_what_lies_there(stale: Stale, wrong_200: bool) -> None:
    async def test(made: Cluster) -> None:
        right = (await made.client.stream(made.decode.url, **GREEDY)).token_ids
        answer = await made.decoded(await stale(made))

        assert (answer.status, answer.is_done, len(answer.token_ids)) == (200, True, 5)
        assert (answer.token_ids == right) != wrong_200
        assert await made.client.gauge(made.prefill.url, "vllm:nixl_num_notifications_after_expiry_total") == 1

    run(test, WorkerSettings(fake=FAKE, lease_s=0.2 if stale is expired else 30, wrong_200=wrong_200))


def test_a_stale_reference_may_be_another_prompts_answer() -> None:
    async def test(made: Cluster) -> None:
        right = (await made.client.stream(made.decode.url, **GREEDY)).token_ids
        reference = await used_twice(made)
        for first in range(4):  # other prompts fill the blocks that were freed
            await made.client.complete(made.prefill.url, **GREEDY | {"prompt": list(range(first + 60, first + 95))})

        assert (await made.decoded(reference)).token_ids not in ([], right)

    run(test, WorkerSettings(fake=replace(FAKE, num_blocks=9)))


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_block_ids"])
def test_an_incomplete_reference_kills_the_decode_worker(missing: str) -> None:
    async def test(made: Cluster) -> None:
        reference = {key: value for key, value in (await made.reference()).items() if key != missing}
        with pytest.raises((TimeoutError, aiohttp.ClientError)):
            await asyncio.wait_for(made.decoded(reference), 0.3)

        async with asyncio.timeout(10):
            while True:
                try:
                    await made.client.gauge(made.decode.url, "vllm:num_requests_running")
                except aiohttp.ClientError:
                    return

    run(test)


def test_a_chunk_may_carry_several_tokens() -> None:
    async def test(made: Cluster) -> None:
        single = await made.client.stream(made.prefill.url, **GREEDY, logprobs=0)
        joined = await made.client.stream(made.decode.url, **GREEDY, logprobs=0)

        assert [len(one["token_ids"]) for one in joined.choices] == [1, 3, 1]
        assert [len(one["logprobs"]["tokens"]) for one in joined.choices] == [1, 3, 1]
        assert joined.token_ids == single.token_ids

    run(test, None, WorkerSettings(fake=FAKE, tokens_per_chunk=3))


def test_without_a_connector_nothing_is_handed_off() -> None:
    async def test(made: Cluster) -> None:
        answer = await made.client.prefill(made.prefill.url, **GREEDY)

        assert answer.body["kv_transfer_params"] is None

    run(test, WorkerSettings(fake=FAKE, connector="none"))


def test_a_header_pins_the_rank() -> None:
    async def test(made: Cluster) -> None:
        for rank in ("0", "1", "1"):
            await made.client.complete(made.prefill.url, {"X-data-parallel-rank": rank}, **GREEDY)

        assert [rank.counts.requests for rank in made.prefill.ranks] == [{"length": 1}, {"length": 2}]
        assert len({rank.engine_id for rank in made.prefill.ranks}) == 2

    run(test, WorkerSettings(fake=FAKE, num_ranks=2))


def test_a_full_worker_queues() -> None:
    async def test(made: Cluster) -> None:
        first, second = (asyncio.create_task(made.client.stream(made.decode.url, **GREEDY)) for _ in range(2))
        await made.client.until(made.decode.url, "vllm:num_requests_waiting", lambda value: value == 1)

        assert (await first).token_ids == (await second).token_ids

    run(test, None, WorkerSettings(fake=replace(FAKE, step_seconds=0.1), max_num_seqs=1))


def test_a_key_is_required_below_v1() -> None:
    async def test(made: Cluster) -> None:
        refused = await made.client.complete(made.decode.url, **GREEDY)
        served = await made.client.complete(made.decode.url, {"Authorization": "Bearer secret"}, **GREEDY)

        assert (refused.status, refused.body) == (401, {"error": "Unauthorized"})
        assert served.status == 200
        assert await made.client.gauge(made.decode.url, "vllm:cache_config_info") == 1

    run(test, None, WorkerSettings(fake=FAKE, api_key="secret"))


def test_requests_are_recorded_as_they_came() -> None:
    async def test(made: Cluster) -> None:
        await made.client.complete(made.decode.url, {"X-Request-Id": "r1"}, **GREEDY, user="u")

        (seen,) = made.decode.received
        assert (seen.leg, seen.headers["x-request-id"], seen.body["user"]) == ("local", "r1", "u")

    run(test)


def test_a_process_is_killed_in_mid_stream() -> None:
    async def main() -> None:
        settings = {"fake": {"num_layers": 1, "step_seconds": 0.02}}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "testing.vllm_worker", "--settings", json.dumps(settings),
            stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
            async with aiohttp.ClientSession() as session:
                fault = {"action": "die", "point": "during", "after_tokens": 2}
                async with session.post(f"{url}/testing/faults", json=fault, timeout=LIMIT) as response:
                    assert response.status == 200
                answer = await WorkerClient(session, "model", {}).stream(url, **GREEDY)

            assert (len(answer.token_ids), answer.is_cut) == (2, True)
            assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(main())
