"""Run one case of the matrix: three streams over two pairs, one process that fails, and every guarantee checked."""

import asyncio
import signal
import time
from dataclasses import dataclass

import httpx

from tests.faults.cases import ANSWER, CLOSED, ERROR, Case
from tests.faults.cluster import PROMPT_TOKENS, FaultCluster, client_of, describe, pools_empty, until
from tests.faults.stream_request import StreamResult, request_stream

NUM_STREAMS = 3
FAULT_S = 10.0
END_S = 15.0
WAKE_S = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one case. Milliseconds count from the fault; `woken_ms` from the SIGCONT."""

    place: str
    action: str
    victim: str
    endings: dict[str, int]
    message: str
    ended_ms: float
    pools_ms: float
    woken_ms: float | None


async def run_case(cluster: FaultCluster, case: Case) -> Measured:
    """Run it over a cluster whose victim was restarted with the case's setting. Fails on a broken guarantee."""
    prompts = [[3 + (7 * stream + 5 * i) % 300 for i in range(PROMPT_TOKENS)] for stream in range(NUM_STREAMS)]
    before, starved_s = cluster.ledger(), cluster.starved_s(cluster.guide.names)
    async with client_of(cluster) as client:
        streams = [asyncio.create_task(request_stream(client, prompt, case.max_tokens)) for prompt in prompts]
        fault_at = await _fault(cluster, case, streams)
        woken_ms = None
        if case.action == "stop":
            still = f"{case.victim} does not stand still"
            await until(lambda: cluster.is_stopped(case.victim), fault_at + FAULT_S, still)
            if case.victim == "scheduler":
                pools_at = await _pools_zero(cluster, case, fault_at, starved_s)
                woken_ms = await _wake(cluster, case)
                results = await _all_ended(streams)
            else:
                results = await _all_ended(streams)
                pools_at = await _pools_zero(cluster, case, fault_at, starved_s)
                woken_ms = await _wake(cluster, case)
        else:
            results = await _all_ended(streams)
            pools_at = await _pools_zero(cluster, case, fault_at, starved_s)
        if case.action == "kill9":
            assert await asyncio.to_thread(cluster.bury, case.victim) == -signal.SIGKILL
        check_outcomes(cluster, case, prompts, results)
        if (case.victim, case.action) != ("scheduler", "kill9"):
            await check_ledger(cluster, before, results)
        if case.action == "stop":
            await _check_woken(cluster, client, case)
    return Measured(
        case.place, case.action, case.victim,
        {name: count for name in (ANSWER, ERROR, CLOSED) if (count := sum(one.outcome == name for one in results))},
        next((one.message for one in results if one.outcome == ERROR), ""),
        round(1000 * max(0.0, max(one.ended_at for one in results) - fault_at), 1),
        round(1000 * max(0.0, pools_at - fault_at), 1),
        woken_ms,
    )  # fmt: skip


def check_outcomes(cluster: FaultCluster, case: Case, prompts: list[list[int]], results: list[StreamResult]) -> None:
    """Every stream ended as the case allows, and its words until then are what the living pairs give."""
    for prompt, one in zip(prompts, results, strict=True):
        assert one.outcome in case.outcomes, f"{case}: {describe(results)}"
        if one.outcome == ANSWER:
            assert len(one.tokens) == case.max_tokens, f"{case}: {len(one.tokens)} tokens of {case.max_tokens}"
        assert not one.tokens or cluster.explains(prompt, one.tokens), (
            f"{case}: {one.tokens} is not what any pair gives, nor two one after the other: "
            f"{cluster.expected(prompt, len(one.tokens))}"
        )
        if one.outcome == ERROR and case.victim != "scheduler":
            assert one.tokens, f"{case}: an error before the first token with a pair left: {one.message}"


async def check_ledger(cluster: FaultCluster, before: dict[str, float], results: list[StreamResult]) -> None:
    """Each request ended exactly once, and as its client saw it."""
    now: dict[str, float] = {}

    def settled() -> bool:
        now.update(cluster.ledger())
        return now["inflight"] == 0

    await until(settled, time.time() + END_S, f"requests are in flight forever: {now}")
    ended = {name: now[name] - before[name] for name in ("received", "completed", "failed", "cancelled", "rejected")}
    failed = sum(one.outcome == ERROR for one in results)
    assert ended == {
        "received": len(results), "completed": len(results) - failed, "failed": failed, "cancelled": 0, "rejected": 0
    }, f"{ended}: {describe(results)}"  # fmt: skip


async def _fault(cluster: FaultCluster, case: Case, streams: list[asyncio.Task[StreamResult]]) -> float:
    """Return when the failpoint acted; a case in which it never does proves nothing."""
    await until(
        lambda: cluster.fault_at(case.victim) is not None, time.time() + FAULT_S, f"{case} never happened: {streams}"
    )
    at = cluster.fault_at(case.victim)
    assert at is not None
    return at


async def _all_ended(streams: list[asyncio.Task[StreamResult]]) -> list[StreamResult]:
    async with asyncio.timeout(END_S):
        return await asyncio.gather(*streams)


async def _pools_zero(cluster: FaultCluster, case: Case, fault_at: float, starved_s: dict[str, float]) -> float:
    """Return when no living, unstopped instance held a block any more: within lease + 1 s of the fault."""
    gone = {case.victim} if case.action in ("kill9", "stop") else set()
    living = [name for name in cluster.guide.names if name not in gone]
    return await pools_empty(cluster, living, fault_at, starved_s)


async def _wake(cluster: FaultCluster, case: Case) -> float:
    """Continue the stopped process; return the ms until its own pool was empty, at most 1 s."""
    began = time.time()
    cluster.guide.processes[case.victim].send(signal.SIGCONT)
    if case.victim == "scheduler":
        return 0.0
    what = f"{case}: {case.victim} holds blocks {WAKE_S} s after waking"
    at = await until(lambda: _is_empty(cluster, case.victim), began + WAKE_S, what)
    return round(1000 * (at - began), 1)


def _is_empty(cluster: FaultCluster, name: str) -> bool:
    return cluster.blocks_used(name) == 0


async def _check_woken(cluster: FaultCluster, client: httpx.AsyncClient, case: Case) -> None:
    """What a woken process still sends about its old work is dropped: no commit, no token, no second finish of it."""
    others = [name for name in cluster.guide.names if name != case.victim]
    admitted = _admissions(cluster, others)
    await asyncio.to_thread(cluster.wait_living, cluster.guide.names)
    await until(cluster.is_seen_idle, time.time() + END_S, "the scheduler never hears that all is idle")
    before = cluster.ledger()
    prompt = [11 + i for i in range(PROMPT_TOKENS)]
    results = await request_stream(client, prompt, 8)
    by = [pair for pair, words in cluster.expected(prompt, 8).items() if words == results.tokens]
    assert (results.outcome, len(by)) == (ANSWER, 1), describe([results])
    ((start, first, decode),) = by
    assert start == first, "the answer began twice"
    await check_ledger(cluster, before, [results])
    own = decode in others  # the request of this check was admitted there
    assert _admissions(cluster, others) == admitted + own
    await _pools_zero(cluster, Case(case.point, case.hit, "delay"), time.time(), cluster.starved_s(cluster.guide.names))


def _admissions(cluster: FaultCluster, names: list[str]) -> int:
    return sum(cluster.log(name).count(" kv_received ") for name in names)
