"""`pdserve route`: how its workers hand off, and the ranktable that it serves."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.ports import free_ports
from pdserve.role_process import serve_scheduler
from pdserve.route import main, parse
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from pdserve.running_workers import running_workers, write_tables
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan, resolve
from ranktable_tools.table_file import write_global
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import MemberState
from scheduler.process import cluster_of
from scheduler.serving import Cluster, build_control
from scheduler.worker_access import WorkerAccess
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.served_model import find_served_model
from security.trust import Trust
from testing.vllm_worker.settings import Connector
from testing.vllm_worker.worker import FakeVllmWorker
from tests.scheduler.fake_cluster import collect, request
from tests.scheduler.virtual_time import until
from tests.scheduler.worker_cluster import SETTINGS, leg_id
from wire.errors import ConfigError, Incompatible
from wire.types import Role

_NEAR = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
_FAR = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://10.255.255.254:8200")
_MOONCAKE = ("--connector", "mooncake")
_LAYERWISE = ("--connector", "ascend-layerwise")


def _plan(words: tuple[str, ...], folder: Path) -> tuple[LaunchPlan, SchedulerOptions]:
    routes, engine, options = parse(words)
    workers = running_workers(routes.prefill, routes.decode, routes.combined, options.connector)
    return resolve(write_tables(workers, engine.port, folder)), options


def _cluster(words: tuple[str, ...], folder: Path) -> Cluster:
    plan, options = _plan(words, folder)
    return cluster_of(plan, Trust(), options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*_NEAR, "--worker-callback", "127.0.0.1:0"), "with --connector auto no worker calls back"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1"), "10.0.0.1 is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:x"), "10.0.0.1:x is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:99999"), "10.0.0.1:99999 is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:1/x"), "10.0.0.1:1/x is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "0.0.0.0:1"), "an address to listen on, not one to reach a host"),
        ((*_FAR, *_LAYERWISE), "10.255.255.254:8200 is on another host and cannot call back to 127.0.0.1"),
        ((*_FAR, *_MOONCAKE), "10.255.255.254:8200, on another host, cannot find the bootstrap server of prefill-0"),
        (
            (*_NEAR, *_MOONCAKE, "--prefill", "http://a:1", "http://A:2"),
            "http://a:2 and prefill-0 at http://a:1 are on one host",
        ),
        ((*_NEAR, "--worker-api-key-file=/dev/null"), "--worker-api-key-file /dev/null: it is empty"),
        (("--prefill", "http://127.0.0.1:1", "--decode", "HTTP://127.0.0.1:1/"), "127.0.0.1:1/ is already prefill-0"),
        (("--combined", "http://u:secret@127.0.0.1:1"), "--combined 127.0.0.1:1 must be .*, without a user"),
        (("--combined", "http://127.0.0.1:9000"), "names port 9000 on 127.0.0.1, as"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, RanktableError), match=message):
        _cluster(words, tmp_path)


def test_a_file_names_the_workers_as_the_flags_do(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "prefill: [http://127.0.0.1:8100]\ndecode: http://127.0.0.1:8200\nconnector: nixl-push\nport: 9100\n"
    )
    routes, engine, options = parse(("--config", str(file), "--decode", "http://127.0.0.1:8300"))

    assert (routes.prefill, routes.decode) == (("http://127.0.0.1:8100",), ("http://127.0.0.1:8300",))
    assert (engine.port, options.connector) == (9100, "nixl-push")


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Route:
    """Runs `pdserve route` with a function of the tables' folder in place of the scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("pdserve.route.with_model_of", lambda workers, engine, options: replace(engine, model="m"))
        monkeypatch.setattr("pdserve.route.with_plain_model", lambda engine, environ, weights: engine)

    def __call__(self, serve: Callable[[Path], int], *flags: str) -> int:
        self._monkeypatch.setattr(
            "pdserve.role_process.serve_scheduler", lambda config, plan: serve(Path(plan.global_path).parent)
        )
        return main((*_NEAR, "--port=0", *flags))


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Route]:
    before = {number: signal.signal(number, lambda *given: None) for number in _SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else nohup has set it
    yield _Route(monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_files_beside_its_tables_stay_at_the_end(tmp_path: Path, route: _Route) -> None:
    def serve(tables: Path) -> int:
        assert len([*tables.iterdir()]) == 3
        (tables / "edited.json").touch()
        return 0

    RunFolder(tmp_path).write(ClusterState("http://127.0.0.1:1", "m", ()))  # of a killed `pdserve up`

    assert route(serve, f"--run-dir={tmp_path}") == 0
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["lock", "state.json", "tables/edited.json"]


@pytest.mark.parametrize("number", _SIGNALS)
def test_a_signal_before_it_serves_leaves_no_files(
    number: signal.Signals, route: _Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(tables: Path) -> int:
        signal.raise_signal(number)
        return 0

    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))

    assert route(serve) == 128 + number
    assert [*(tmp_path / "route").iterdir()] == []


def test_the_folder_of_a_running_cluster_is_refused(tmp_path: Path, route: _Route) -> None:
    watcher = ProcessRecord("supervisor", "supervisor", os.getpid(), start_time(os.getpid()) or 0, "", "")
    RunFolder(tmp_path).write(ClusterState("http://127.0.0.1:1", "m", (), watcher))

    with pytest.raises(ConfigError, match="a cluster already runs at"):
        route(lambda tables: 0, f"--run-dir={tmp_path}")


def test_a_taken_port_for_callbacks_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = (*_NEAR, *_LAYERWISE, "--port=0", "--worker-callback", f"127.0.0.1:{taken.getsockname()[1]}")
        plan, options = _plan(words, tmp_path)
        config = SchedulerConfig(replace(parse(words)[1], model="m"), options)
        with pytest.raises(ConfigError, match=r"--worker-callback \d+ on 127.0.0.1: in use"):
            serve_scheduler(config, plan)


@pytest.mark.anyio
async def test_the_model_is_that_of_workers_that_can_serve() -> None:
    workers = [FakeVllmWorker(replace(SETTINGS, model=model)) for model in ("other", "other", "m", "m")]
    for worker in workers:
        await worker.start()
    urls = [worker.url for worker in workers]
    try:
        for prefill, decode, model in ((urls[:1], urls[1:2], "other"), (urls[:3], urls[3:], "m")):
            running = running_workers(prefill, decode, (), "auto")
            assert (await find_served_model(running.urls, "", running.can_serve)).root == model
        found = await find_served_model(("http://127.0.0.1:1", *urls[1:3]), "", lambda urls: False)
        assert found.root == "other"
    finally:
        for worker in workers:
            await worker.stop()


_READ = {"do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"}
_LEGS: dict[str, tuple[Connector, set[str], set[str]]] = {
    "auto": ("nixl", {"do_remote_decode"}, _READ),
    "nixl": ("nixl", {"do_remote_decode"}, _READ),
    "ascend": ("nixl", {"do_remote_decode"}, _READ),
    "ascend-layerwise": (
        "ascend-layerwise", {"do_remote_decode", "remote_host", "remote_block_ids"},
        {"do_remote_prefill", "metaserver"},
    ),
    "nixl-push": ("nixl-push", {"do_remote_decode"}, _READ),
    "mooncake": (
        "mooncake", {"do_remote_decode", "transfer_id"},
        {"do_remote_prefill", "transfer_id", "remote_engine_id", "remote_bootstrap_addr"},
    ),
}  # fmt: skip
"""The connector of the workers, and what the transfer parameters of each leg have."""


@pytest.mark.parametrize("connector", _LEGS)
@pytest.mark.anyio
async def test_each_connector_sends_its_own_two_legs(
    connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, prefill_keys, decode_keys = _LEGS[connector]
    (bootstrap,) = free_ports(1)
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap))
    workers = [FakeVllmWorker(replace(SETTINGS, connector=kind, bootstrap_port=port)) for port in (bootstrap, 0)]
    for worker in workers:
        await worker.start()
    words = ("--prefill", workers[0].url, "--decode", workers[1].url, "--port=0", "--connector", connector)
    try:
        async with _running(_cluster(words, tmp_path)) as control:
            await until(control.ready, timeout_s=30.0)
            for worker in workers:
                worker.received.clear()
            await collect(control.dispatch, request((1, 2, 3)))
        legs = [worker.received[0] for worker in workers]
    finally:
        for worker in workers:
            await worker.stop()

    prefill, decode = (one.body["kv_transfer_params"] for one in legs)
    for sent, keys in ((prefill, prefill_keys), (decode, decode_keys)):
        assert not [key for key in keys if not sent.get(key)], sent
    assert (prefill["do_remote_decode"], decode["do_remote_prefill"]) == (True, True)
    assert prefill.get("transfer_id") == decode.get("transfer_id")
    assert len({leg_id(one) for one in legs}) == 1
    assert [one.body["max_tokens"] for one in legs] == [1, 4]


def test_mooncake_serves_other_hosts_and_combined_workers(tmp_path: Path) -> None:
    words = ("--prefill", "http://10.255.255.253:1", "http://10.255.255.254:1", "--decode", "http://10.255.255.254:2")

    cluster = _cluster((*words, "--combined", "http://10.255.255.253:3", *_MOONCAKE), tmp_path)

    assert [(str(one), one.is_worker) for one in cluster.expected] == [
        ("prefill-0 at http://10.255.255.253:1", True),
        ("prefill-1 at http://10.255.255.254:1", True),
        ("combined-0 at http://10.255.255.253:3", True),
        ("decode-0 at http://10.255.255.254:2", True),
    ]
    connections = [cluster.connect(one.address) for one in cluster.expected]
    assert [one._bootstrap and one._bootstrap.url for one in connections if isinstance(one, WorkerConnection)] == [
        f"http://10.255.255.{host}:8998" for host in (253, 254, 253, 254)
    ]


def test_a_combined_worker_is_one_member_in_both_groups(tmp_path: Path) -> None:
    words = ("--prefill", "http://h:1", "--decode", "https://h", "--combined", "http://h:3/", "http://[fe80::2]:4")

    cluster = _cluster((*words, "--port=0"), tmp_path)

    assert [str(one) for one in cluster.expected] == [
        "prefill-0 at http://h:1",
        "combined-0 at http://h:3",
        "combined-1 at http://[fe80::2]:4",
        "decode-0 at https://h:443",
    ]


@contextlib.asynccontextmanager
async def _running(cluster: Cluster) -> AsyncIterator[Control]:
    control = build_control(cluster, ControlLimits())
    assert cluster.follow is not None
    tasks = [asyncio.create_task(control.run()), asyncio.create_task(cluster.follow(control.registry))]
    try:
        yield control
    finally:
        await control.dispatch.close(0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.anyio
async def test_layerwise_workers_with_a_key_serve_and_leave_by_the_table(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    settings = replace(SETTINGS, connector="ascend-layerwise", api_key="secret")
    workers = [FakeVllmWorker(settings) for _ in "PDD"]
    for worker in workers:
        await worker.start()
    words = ("--prefill", workers[0].url, "--decode", workers[1].url, "--port=0", *_LAYERWISE)
    plan, options = _plan((*words, f"--worker-api-key-file={tmp_path / 'key'}"), tmp_path / "tables")
    try:
        async with _running(cluster_of(plan, Trust(), options)) as control:
            await until(control.ready, timeout_s=30.0)
            await collect(control.dispatch, request((1, 2, 3)))

            moved = replace(plan.global_table.decode[0], url=workers[2].url)
            write_global(Path(plan.global_path), replace(plan.global_table, decode=(moved,)))
            await until(
                lambda: [one.name for one in control.registry.living()] == ["prefill-0", "decode-1"], timeout_s=30.0
            )
            await until(lambda: not control.registry.gaps(), timeout_s=30.0)
            workers[2].received.clear()
            await collect(control.dispatch, request((1, 2, 3)))

            assert any("kv_transfer_params" in one.body for one in workers[2].received)
    finally:
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize(
    ("connector", "group", "url", "why"),
    [
        ("ascend-layerwise", "decode", "http://10.255.255.254:1", "cannot call back to 127.0.0.1"),
        ("mooncake", "decode", "http://10.255.255.254:1", "cannot find the bootstrap server of prefill-0 at"),
        ("mooncake", "prefill", "http://localhost:8101", "and prefill-0 at http://127.0.0.1:8100 are on one host"),
        ("auto", "decode", "http://127.0.0.1:1", "Connection refused"),
    ],
)
@pytest.mark.anyio
async def test_a_worker_that_joins_out_of_reach_is_refused(
    connector: str, group: str, url: str, why: str, tmp_path: Path
) -> None:
    plan, options = _plan((*_NEAR, "--connector", connector), tmp_path)
    async with _running(cluster_of(plan, Trust(), options)) as control:
        table = plan.global_table
        prefill, decode = (replace(one[0], url=url) for one in (table.prefill, table.decode))
        more = (prefill,) if group == "prefill" else (), (decode,) if group == "decode" else ()
        joined = replace(table, prefill=table.prefill + more[0], decode=table.decode + more[1])
        write_global(Path(plan.global_path), joined)
        await until(lambda: len(control.registry.members) == 3, timeout_s=30.0)
        added = next(one for one in control.registry.members if one.expected.address == url)
        await until(lambda: why in added.why, timeout_s=30.0)
        assert (added.state == "refused") is (connector != "auto")


_FAR_PREFILL = ExpectedInstance(0, "prefill-0", Role.PREFILL, "http://10.255.255.253:8100", "", ())
_FAR_DECODE = ExpectedInstance(1, "decode-0", Role.DECODE, "http://10.255.255.254:8200", "", ())
_NEAR_PREFILL = ExpectedInstance(2, "prefill-1", Role.PREFILL, "http://127.0.0.1:8101", "", ())
_SAME_HOST = replace(_NEAR_PREFILL, address="http://10.255.255.253:8101")


_JOINS = {
    "near": (_NEAR_PREFILL, "decode-0 at http://10.255.255.254:8200, on another host, cannot find the bootstrap"),
    "same host": (_SAME_HOST, "prefill-1 at http://10.255.255.253:8101 and prefill-0 at .* are on one host"),
}


@pytest.mark.parametrize(("joined", "why"), _JOINS.values(), ids=_JOINS)
@pytest.mark.anyio
async def test_who_joins_is_refused_and_not_who_reconnects(
    joined: ExpectedInstance, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = WorkerAccess(SchedulerOptions(connector="mooncake"))
    rank_1 = replace(_FAR_PREFILL, index=1_000_000, address=f"{_FAR_PREFILL.address}#rank=1")
    # a table has its prefill workers first
    members = [_member(one) for one in (joined, _FAR_PREFILL, rank_1, _FAR_DECODE)]
    access.follow(lambda: members)

    with pytest.raises(Incompatible, match=why):
        await access._check(joined.address)
    for earlier in (_FAR_PREFILL, _FAR_DECODE):
        await access._check(earlier.address)

    async def after_the_next_table(function: Callable[..., str | None], *given: object) -> str | None:
        members.clear()
        return function(*given)

    monkeypatch.setattr(asyncio, "to_thread", after_the_next_table)
    with pytest.raises(Incompatible, match=why):
        await access._check(joined.address)


@pytest.mark.parametrize(("joined", "why"), _JOINS.values(), ids=_JOINS)
@pytest.mark.anyio
async def test_a_refused_worker_keeps_no_other_out(joined: ExpectedInstance, why: str) -> None:
    access = WorkerAccess(SchedulerOptions(connector="mooncake"))
    refused = [_member(one, MemberState.REFUSED) for one in (_FAR_PREFILL, _FAR_DECODE)]
    access.follow(lambda: [_member(joined, MemberState.LIVING), *refused])

    await access._check(joined.address)

    clashing = _FAR_DECODE if joined is _NEAR_PREFILL else _FAR_PREFILL
    with pytest.raises(Incompatible):  # although it is earlier in the table: the other serves now
        await access._check(clashing.address)


def _member(expected: ExpectedInstance, state: MemberState = MemberState.CONNECTING) -> Any:
    return SimpleNamespace(expected=expected, state=state, is_living=state is MemberState.LIVING)
