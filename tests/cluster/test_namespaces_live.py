"""Hosts join and leave by the table while requests run: in the end all are different, and no request failed."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import Process
from tests.cluster.host_cluster import MERGE, HostCluster
from tests.cluster.hosts import obstacle
from tests.cluster.load import LIMITS, NUM_CLIENTS, STALL_S, Load
from tests.faults.cases import ANSWER

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]

FLAGS = (*ENGINE_FLAGS, *LIMITS, "--no-enable-prefix-caching")
JOIN_S = 300.0
FIRST, SECOND = ("prefill0", "decode0"), ("prefill1", "decode1")


def _join(cluster: HostCluster, name: str) -> None:
    cluster.join(name)
    address = cluster.network.address_by_name[name]
    cluster.wait(f"{name} living", lambda: cluster.states().get(address) == "living", JOIN_S)


def _version(cluster: HostCluster) -> float:
    (version,) = cluster.gauge("pdserve_table_version")
    return version.value


def _leave(cluster: HostCluster, name: str) -> Process:
    """Remove a host from the table and wait until the scheduler has seen it: two changes at once would be one."""
    before = _version(cluster)
    left = cluster.leave(name)
    cluster.wait(f"the table without {name}", lambda: _version(cluster) > before, JOIN_S)
    return left


async def _replace_all(cluster: HostCluster) -> tuple[Load, list[Process]]:
    """Send requests throughout while new instances join and the old ones leave; the last answers are the new ones'."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    left = []
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=300, trust_env=False, limits=limits) as http:
        load = Load(http, STALL_S)
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(load.client(number))
            await load.each(num_answers=2)
            for name in SECOND:
                await asyncio.to_thread(_join, cluster, name)
            await load.each(num_answers=2)
            for name in FIRST:
                left.append(await asyncio.to_thread(_leave, cluster, name))
            await load.each(num_answers=3)
            load.stop()
    return load, left


def test_replacing_every_instance_fails_no_request(tmp_path: Path, tiny_model: Path) -> None:
    with HostCluster(tmp_path, tiny_model, FLAGS, FIRST, late=SECOND) as cluster:
        cluster.generate()
        cluster.merge(*MERGE)
        cluster.up()
        scheduler = cluster.processes["scheduler"].pid
        with cluster.as_client():
            load, left = asyncio.run(_replace_all(cluster))
        statuses, words = [one.wait() for one in left], [one.log for one in left]
        addresses = {cluster.network.address_by_name[name] for name in SECOND}
        cluster.wait("alone", lambda: cluster.states() == dict.fromkeys(addresses, "living"))
        cluster.wait_idle()
        ledger, version = cluster.ledger(), _version(cluster)
        log = cluster.processes["scheduler"].log
        assert cluster.processes["scheduler"].pid == scheduler

    assert {(one.outcome, one.message) for client in load.results for one in client} == {(ANSWER, "")}
    assert all(len({"".join(one.tokens) for one in client}) == 1 for client in load.results)
    assert (ledger["failed"], ledger["completed"]) == (0, sum(map(len, load.results)))
    assert statuses == [0, 0]
    assert all("is gone from the global table" in one for one in words)
    assert version == 5
    assert all(f"version={number} digest=" in log for number in (2, 3, 4, 5))
