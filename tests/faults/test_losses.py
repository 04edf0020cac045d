"""Faults outside the matrix: permanent ones, repeated ones, and those that leave no peer."""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from pdserve import cli
from tests.faults.cases import ANSWER, CLOSED, ERROR
from tests.faults.cluster import PROMPT_TOKENS, FaultCluster, client_of, describe, pools_empty, until
from tests.faults.stream_request import StreamResult, request_stream

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """Two P, two D and a scheduler."""
    with FaultCluster(tmp_path_factory.mktemp("losses")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lone_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """One P, one D and a scheduler."""
    with FaultCluster(tmp_path_factory.mktemp("lone"), pairs=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lone_local_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """One P, one D, and a scheduler that serves without either of them."""
    flags = ("--when-prefill-is-gone=local", "--when-decode-is-gone=local")
    with FaultCluster(tmp_path_factory.mktemp("local"), pairs=1, flags=flags) as cluster:
        yield cluster


def _prompts(count: int) -> list[list[int]]:
    return [[3 + (7 * stream + 5 * i) % 300 for i in range(PROMPT_TOKENS)] for stream in range(count)]


async def _request_all(cluster: FaultCluster, count: int, max_tokens: int = 8) -> list[StreamResult]:
    async with client_of(cluster) as client, asyncio.timeout(300):
        return await asyncio.gather(*(request_stream(client, prompt, max_tokens) for prompt in _prompts(count)))


def _assert_answers(cluster: FaultCluster, results: Sequence[StreamResult], max_tokens: int = 8) -> None:
    for prompt, one in zip(_prompts(len(results)), results, strict=True):
        assert one.outcome == ANSWER, describe(results)
        assert len(one.tokens) == max_tokens, describe(results)
        assert cluster.explains(prompt, one.tokens), describe(results)


def _assert_empty(cluster: FaultCluster, names: Sequence[str]) -> None:
    asyncio.run(pools_empty(cluster, names, time.time(), cluster.starved_s(names)))


@pytest.mark.parametrize(
    ("victim", "setting"),
    [
        ("prefill-0", "prefill.before_chunk=raise"), ("prefill-0", "prefill.in_chunk=raise"),
        ("prefill-0", "kv.send.mid=raise"), ("prefill-0", "kv.send.mid=corrupt"), ("decode-0", "decode.reserve=raise"),
        ("decode-0", "kv.before_commit=raise"), ("decode-0", "decode.token=raise"),
    ],
)  # fmt: skip
def test_an_instance_that_fails_every_prompt_loses_no_answer(cluster: FaultCluster, victim: str, setting: str) -> None:
    cluster.renew(victim, setting)

    results = asyncio.run(_request_all(cluster, 6))

    _assert_answers(cluster, results)
    assert cluster.log(victim).count(" failpoint ") > 1
    _assert_empty(cluster, cluster.guide.names)


def test_prefill_killed_while_sending_returns_on_its_port_each_time(cluster: FaultCluster) -> None:
    for _ in range(10):
        cluster.renew("prefill-0", "kv.send.mid=kill9@3")
        results = asyncio.run(_request_all(cluster, 2))

        _assert_answers(cluster, results)
        assert cluster.bury("prefill-0") == -signal.SIGKILL
    cluster.renew("prefill-0", "")
    _assert_answers(cluster, asyncio.run(_request_all(cluster, 2)))
    assert "kv_sent" in cluster.log("prefill-0")
    _assert_empty(cluster, cluster.guide.names)


def test_killing_prefill_after_the_hand_off_is_invisible(cluster: FaultCluster) -> None:
    cluster.renew("prefill-0", "")

    async def run() -> StreamResult:
        async with client_of(cluster) as client, asyncio.timeout(300):
            pending = asyncio.create_task(request_stream(client, _prompts(1)[0], 100))
            await until(lambda: "kv_sent" in cluster.log("prefill-0"), time.time() + 300, "nothing was handed off")
            await asyncio.to_thread(cluster.guide.kill, "prefill-0")
            assert not pending.done()
            return await pending

    result = asyncio.run(run())

    _assert_answers(cluster, [result], 100)
    _assert_empty(cluster, ["prefill-1", "decode-0", "decode-1"])


@pytest.mark.parametrize("count", [2, 50])
def test_killing_decode_mid_answer_is_invisible(cluster: FaultCluster, count: int) -> None:
    cluster.renew("decode-0", f"decode.token=kill9@{5 * count}")

    results = asyncio.run(_request_all(cluster, count, 30))

    _assert_answers(cluster, results, 30)
    assert cluster.bury("decode-0") == -signal.SIGKILL
    _assert_empty(cluster, ["prefill-0", "prefill-1", "decode-1"])


def test_killing_the_scheduler_under_load_leaves_no_work_behind(cluster: FaultCluster) -> None:
    cluster.renew("scheduler", "scheduler.between=kill9@20")

    results = asyncio.run(_request_all(cluster, 50, 300))

    assert {one.outcome for one in results} == {CLOSED}, describe(results)
    assert cluster.bury("scheduler") == -signal.SIGKILL
    _assert_empty(cluster, cluster.guide.names)
    cluster.renew("scheduler", "")
    _assert_answers(cluster, asyncio.run(_request_all(cluster, 3)))
    _assert_empty(cluster, cluster.guide.names)


@pytest.mark.parametrize(
    ("victim", "setting", "words"),
    [
        ("prefill-0", "prefill.in_chunk=kill9", "prefill-0"),
        ("prefill-0", "prefill.in_chunk=raise", "internal error"),
        ("prefill-0", "prefill.between_chunks=stop", "prefill-0"),
        ("decode-0", "decode.reserve=kill9", "decode-0"),
        ("decode-0", "decode.reserve=raise", "internal error"),
        ("decode-0", "decode.reserve=stop", "decode-0"),
    ],
)
def test_with_no_peer_left_the_error_comes_before_any_token(
    lone_pair: FaultCluster, victim: str, setting: str, words: str
) -> None:
    lone_pair.renew(victim, setting)

    (result,) = asyncio.run(_request_all(lone_pair, 1))

    assert (result.outcome, result.tokens) == (ERROR, []), describe([result])
    assert words in result.message
    _assert_empty(lone_pair, [name for name in lone_pair.guide.names if name != victim])
    if setting.endswith("kill9"):
        assert lone_pair.bury(victim) == -signal.SIGKILL


def test_without_a_decode_instance_requests_are_refused_at_once(lone_pair: FaultCluster) -> None:
    lone_pair.renew("decode-0", "")
    lone_pair.guide.kill("decode-0")
    asyncio.run(until(lambda: len(lone_pair.living()) == 1, time.time() + 5, "decode-0 is held for living"))

    reply = lone_pair.guide.client.post("/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 2})

    assert reply.status == 503, reply.body
    assert "decode-0" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("victim", "failpoint"), [("prefill-0", "prefill.in_chunk"), ("decode-0", "decode.token")])
def test_without_a_role_the_other_one_answers_alone_if_it_may(
    lone_local_pair: FaultCluster, victim: str, failpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, (role, _, _) = lone_local_pair, victim.partition("-")
    cluster.renew(victim, f"{failpoint}=kill9@5")

    results = asyncio.run(_request_all(cluster, 3))

    assert [one.outcome for one in results] == [ANSWER] * 3, describe(results)
    assert [len(one.tokens) for one in results] == [8] * 3
    assert cluster.bury(victim) == -signal.SIGKILL
    client = cluster.guide.client
    reply = client.post("/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 4})
    assert (reply.status, reply.json()["usage"]["completion_tokens"]) == (200, 4)
    ready = client.get("/ready")
    assert (ready.status, ready.json()["roles_gone"]) == (200, {role: "local"})
    assert cli.main(["status", "--url", cluster.base_url]) == 0
    assert f"  ready  model tiny  {role} gone: the others serve alone  " in capsys.readouterr().out
    (served,) = (
        sample.value for sample in client.metrics()
        if sample.name == "pdserve_prompts_served_without_role_total" and sample.labels["role"] == role
    )  # fmt: skip
    assert served >= 2

    cluster.start(victim)
    cluster.wait_living(cluster.guide.names)
    _assert_answers(cluster, asyncio.run(_request_all(cluster, 2)))
    assert client.get("/ready").json()["roles_gone"] == {}
    _assert_empty(cluster, cluster.guide.names)
