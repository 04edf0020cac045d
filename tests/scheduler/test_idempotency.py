"""Requests with an Idempotency-Key: a repeated one joins the first, at any scheduler, or gets its answer again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.scheduler_pair import BODIES, CHAT, COMPLETIONS, MESSAGES, USAGE, Client, Pair, pair
from wire.messages import ClaimRun, Prefill

pytestmark = pytest.mark.anyio

KEY = "order-7"


def post(
    served: Pair, path: str = COMPLETIONS, *, at: int = 0, key: str = "a", name: str = KEY, **changes: Any
) -> Client:  # fmt: skip
    body = {"stream": False} | BODIES[path] | changes
    return Client(served.schedulers[at].app, path, body, {"Idempotency-Key": name}, key)


def num_runs(served: Pair) -> int:
    commands = [command for instance in served.instances.instances for command in instance.commands]
    return sum(isinstance(command, Prefill) and not command.prompt.probe for command in commands)


async def running(served: Pair, at: int = 0, **changes: Any) -> Client:
    """Return a request that is decoded."""
    for instance in served.instances.instances:
        instance.behaviour.step_s = 0.02
    client = post(served, at=at, **changes)
    await served.until(lambda: decoders(served))
    return client


def decoders(served: Pair) -> list[int]:
    """Return which instances have output of a running stream."""
    return [
        number
        for number, instance in enumerate(served.instances.instances)
        if any(one.kept and one.kept.has_output and not one.kept.is_finished for one in instance.prompts.values())
    ]


async def run_again(served: Pair) -> float:
    return (await served.metrics())["pdserve_requests_run_again_total"]


def num_claims(served: Pair) -> list[int]:
    """Return how many claims each instance has got."""
    return [sum(isinstance(one, ClaimRun) for one in each.commands) for each in served.instances.instances]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_of_a_finished_request_is_repeated(
    model_folder: Path, path: str, at: int, stream: bool
) -> None:
    async with pair(model_folder) as served:
        first = post(served, path, stream=stream)
        await first.whole()
        again = post(served, path, stream=stream, at=at)
        await again.whole()

        assert (first.status, again.status) == (200, 200)
        assert again.content == first.content
        assert first.headers["content-type"] == again.headers["content-type"]
        assert ("x-pdserve-replayed" in first.headers, again.headers["x-pdserve-replayed"]) == (False, "true")
        assert (num_runs(served), await run_again(served)) == (1, 0)


@pytest.mark.parametrize("at", [0, 1])
async def test_both_clients_of_a_running_request_get_its_answer(model_folder: Path, at: int) -> None:
    async with pair(model_folder) as served:
        first = await running(served)
        again = post(served, at=at)
        other_body, other_key = post(served, at=at, max_tokens=3), post(served, at=at, key="b", max_tokens=3)
        for client in (first, again, other_body, other_key):
            await client.whole()

        assert (first.status, again.content) == (200, first.content)
        assert (other_body.status, other_key.status) == (422, 200)
        assert "send a new key" in json.loads(other_body.content)["error"]["message"]
        assert num_runs(served) == 2  # one for each API key


def text_and_usage(client: Client) -> tuple[str, tuple[int, int]]:
    answers = client.events or [json.loads(client.content)]
    usage = answers[-1]["usage"]
    texts = [choice["text"] for answer in answers for choice in answer["choices"]]
    return "".join(texts), (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("end", "at"), [("client leaves", 0), ("client leaves", 1), ("scheduler dies", 1)])
async def test_a_repeated_request_continues_the_run(model_folder: Path, end: str, at: int, stream: bool) -> None:
    changes = {"stream": stream} | (USAGE if stream else {})
    async with pair(model_folder) as served:
        reference = post(served, name="reference", **changes)
        await reference.whole()
        before = await served.metrics()
        first = await running(served, **changes)
        if end == "client leaves":
            first.leave()
        else:
            served.die(0)
        again = post(served, at=at, **changes)
        await again.whole()
        third = post(served, at=1, **changes)
        await third.whole()
        counted = await served.metrics() - before

        assert (again.status, text_and_usage(again)) == (200, text_and_usage(reference))
        assert third.content == again.content
        assert (num_runs(served), await run_again(served)) == (2, 0)
        by_name = {name.partition("{")[0]: value for name, value in counted.items()}
        assert (by_name["vllm:prompt_tokens_total"], by_name["vllm:generation_tokens_total"]) == (1, 40)


async def test_a_repeated_stream_takes_the_place_of_the_first(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        first = await running(served, stream=True)
        again = post(served, at=1, stream=True)
        await first.whole()
        whole = await again.whole()
        third = post(served, stream=True)

        assert first.events[-1]["error"]["code"] == 409
        assert whole[-1]["choices"][0]["finish_reason"] == "length"
        assert await third.whole() == whole
        assert num_runs(served) == 1


async def test_a_stream_continued_by_its_id_still_runs_once(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        first = await running(served, stream=True)
        had = (await first.read(3))[:3]
        first.leave()
        rest = await served.resume(first.stream_id, 3).whole()
        again = post(served, stream=True)

        assert await again.whole() == had + rest
        assert (num_runs(served), await run_again(served)) == (1, 0)


NOT_KEPT: list[tuple[dict[str, Any], float]] = [
    ({"n": 2}, 10.0),
    ({"prompt": ["a", "b"]}, 10.0),
    ({"user": "x" * 2**20}, 10.0),
    ({}, 0.0),
    ({"stream": True}, 0.0),
]


@pytest.mark.parametrize(("changes", "orphan_limit"), NOT_KEPT)
async def test_a_request_whose_tokens_are_not_kept_is_joined(
    model_folder: Path, changes: dict[str, Any], orphan_limit: float
) -> None:
    async with pair(model_folder, orphan_limit=orphan_limit) as served:
        for instance in served.instances.instances:
            instance.behaviour.step_s = 0.005
        clients = [post(served, at=at, **changes) for at in (0, 1, 1)]
        for client in clients:
            await client.whole()
        runs = num_runs(served)
        clients.append(post(served, **changes))
        await clients[-1].whole()

        assert {client.status for client in clients} == {200}
        assert len({client.content for client in clients}) == 1
        assert num_runs(served) == runs == (2 if isinstance(changes.get("prompt"), list) else 1)


async def test_a_request_that_failed_may_be_sent_again(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        served.instances.kill(0)
        await served.until(lambda: served.schedulers[0].control.registry.missing())
        failed = post(served)
        await failed.whole()
        served.instances.boot(0)
        await served.until(lambda: served.schedulers[0].control.ready())
        again = post(served)
        await again.whole()

        assert (failed.status, again.status) == (503, 200)
        assert await run_again(served) == 0


async def test_what_died_with_its_scheduler_runs_again(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        served.instances.instances[0].behaviour.stuck = True
        post(served)
        await served.until(lambda: num_runs(served))
        served.die(0)
        served.instances.instances[0].get_unstuck()
        again = post(served, at=1)
        await again.whole()

        assert (again.status, num_runs(served), await run_again(served)) == (200, 2, 1)


@pytest.mark.parametrize("at", [0, 1])
async def test_the_claim_of_a_running_request_moves(model_folder: Path, at: int) -> None:
    async with pair(model_folder, "PDD") as served:
        for number in range(64):  # until it is decoded elsewhere than its record is
            name = f"{KEY}-{number}"
            before = num_claims(served)
            first = await running(served, name=name)
            (holder,) = [at for at, number in enumerate(num_claims(served)) if number > before[at]]
            if decoders(served) != [holder]:
                break
            await first.whole()
        served.instances.kill(holder)
        await served.until(lambda: all(one.control.registry.missing() for one in served.schedulers))
        again = post(served, at=at, name=name)
        runs = num_runs(served)
        for client in (first, again):
            await client.whole()

        assert (first.status, again.content) == (200, first.content)
        assert (num_runs(served), await run_again(served)) == (runs, 0)


async def test_a_finished_request_whose_record_is_lost_runs_again(model_folder: Path) -> None:
    async with pair(model_folder, "PDD") as served:
        first = post(served)
        await first.whole()
        served.instances.kill(num_claims(served).index(1))
        await served.until(lambda: all(one.control.registry.missing() for one in served.schedulers))
        again = post(served)
        await again.whole()

        assert (again.status, num_runs(served), await run_again(served)) == (200, 2, 1)


async def test_an_instance_that_comes_back_has_no_records(model_folder: Path) -> None:
    async with pair(model_folder, "PDD") as served:
        first = post(served, n=2)
        await served.until(lambda: sum(num_claims(served)))
        holder = num_claims(served).index(1)
        other = served.instances.instances[3 - holder]
        other.get_stuck()  # so that the first does not end too early
        served.instances.kill(holder)
        registries = [one.control.registry for one in served.schedulers]
        await served.until(lambda: all(one.missing() for one in registries))
        served.instances.boot(holder, epoch=9)
        await served.until(lambda: not any(one.missing() for one in registries))
        again = post(served, at=1, n=2)
        await served.until(lambda: num_claims(served)[holder])
        other.get_unstuck()
        for client in (first, again):
            await client.whole()

        assert (first.status, again.status) == (200, 200)
        assert await run_again(served) == 1  # counted by the first, at whose end the other one's claim is there


@pytest.mark.parametrize(
    ("limit", "status", "message"),
    [
        ("scheduler.request_claims.MAX_KEPT_ANSWER", 409, "too large to be kept"),
        ("wire.claim_table.MAX_CLAIM_BYTES", 429, "too many requests"),
    ],
)
async def test_what_has_no_room_has_a_reason(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, status: int, message: str
) -> None:
    async with pair(model_folder) as served:
        monkeypatch.setattr(limit, 0)
        await post(served).whole()
        again = post(served)
        await again.whole()

        assert (again.status, message in json.loads(again.content)["error"]["message"]) == (status, True)


async def test_a_holder_that_does_not_answer_is_a_503(model_folder: Path) -> None:
    async with pair(model_folder, "PDD") as served:
        for address in ("10.0.0.1:8001", "10.0.0.1:8002"):
            served.instances.network.freeze(address)
        client = post(served)
        await client.whole()

        assert (client.status, b"does not answer" in client.content) == (503, True)
        assert client.headers["retry-after"] == "1"


@pytest.mark.parametrize("name", ["", "x" * 256])
async def test_a_key_has_a_length(model_folder: Path, name: str) -> None:
    async with pair(model_folder) as served:
        client = post(served, name=name)
        await client.whole()

        assert (client.status, b"must have 1 to 255" in client.content) == (400, True)
