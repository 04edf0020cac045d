"""A link between hosts breaks under load and recovers: each request ends once, later all succeed, nothing restarts."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.host_cluster import MERGE, HostCluster
from tests.cluster.hosts import Network, obstacle
from tests.cluster.load import LIMITS, NUM_CLIENTS, STALL_S, Load
from tests.faults.cases import ANSWER, ERROR

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]

FLAGS = (*ENGINE_FLAGS, *LIMITS, "--no-enable-prefix-caching")


async def _load(
    cluster: HostCluster, cut: Callable[[], None], heal: Callable[[], None], stall_s: int = STALL_S, **during: int
) -> Load:
    """Send requests throughout: before the cut, until each client saw that many outcomes, and after it."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=300, trust_env=False, limits=limits) as http:
        load = Load(http, stall_s)
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(load.client(number))
            await load.each(num_answers=2)
            cut()
            await load.each(**during)
            heal()
            await load.each(num_answers=3)
            load.stop()
    return load


def _between(network: Network) -> tuple[Callable[[], None], Callable[[], None]]:
    """The path between P and D alone: the scheduler and the clients reach both as before."""
    return lambda: network.part("prefill", "decode"), lambda: network.join("prefill", "decode")


def _cable(name: str) -> Callable[[Network], tuple[Callable[[], None], Callable[[], None]]]:
    """The one cable of a host."""
    return lambda network: (lambda: network.unplug(name), lambda: network.plug_in(name))


@pytest.mark.parametrize(
    "choose", [_between, _cable("decode"), _cable("prefill")], ids=["prefill-decode", "decode", "prefill"]
)
def test_each_request_ends_once_while_a_link_is_cut_and_restored(
    tmp_path: Path, tiny_model: Path, choose: Callable[[Network], tuple[Callable[[], None], Callable[[], None]]]
) -> None:
    with HostCluster(tmp_path, tiny_model, FLAGS) as cluster:
        cluster.generate()
        cluster.merge(*MERGE)
        cluster.up()
        with cluster.as_client():
            load = asyncio.run(_load(cluster, *choose(cluster.network), num_answers=0, num_errors=2))
        cluster.wait_idle()
        ledger = cluster.ledger()
        (link,) = cluster.gauge("pdserve_link_up")

    results = [one for client in load.results for one in client]
    assert {one.outcome for one in results} == {ANSWER, ERROR}
    assert all(one.message for one in results if one.outcome == ERROR)
    for client in load.results:
        (answer,) = {"".join(one.tokens) for one in client if one.outcome == ANSWER}
        assert all(answer.startswith("".join(one.tokens)) for one in client)
    failed = sum(one.outcome == ERROR for one in results)
    assert ledger["received"] + ledger["rejected"] == len(results)
    assert (ledger["completed"], ledger["cancelled"]) == (len(results) - failed, 0)
    assert (link.labels["transport"], link.value) == ("tcp", 1.0)


def test_with_another_pair_left_a_cut_link_fails_no_request(tmp_path: Path, tiny_model: Path) -> None:
    """P gives up on a peer that accepts nothing for 10 s; a request that may wait longer uses the other pair."""
    stall_s = 3 * STALL_S
    flags = (*FLAGS, f"--stall-timeout={stall_s}")
    with HostCluster(tmp_path, tiny_model, flags, ("prefill", "decode0", "decode1")) as cluster:
        cluster.generate()
        cluster.merge(*MERGE)
        cluster.up()
        part, join = cluster.network.part, cluster.network.join
        with cluster.as_client():
            pair = ("prefill", "decode0")
            load = asyncio.run(_load(cluster, lambda: part(*pair), lambda: join(*pair), stall_s, num_answers=4))
        cluster.wait_idle()
        (retried,) = cluster.gauge("pdserve_prompts_retried_total")

    assert {(one.outcome, one.message) for client in load.results for one in client} == {(ANSWER, "")}
    assert all(len({"".join(one.tokens) for one in client}) == 1 for client in load.results)
    assert retried.value > 0
