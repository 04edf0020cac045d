"""`pdserve up --ray` on a Ray cluster of several nodes: placement, serving, killed nodes, recovery, shutdown."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.ray_cluster.messages import Placement, decode
from pdserve.run_folder import ProcessRecord
from ranktable_tools.table_file import read_global
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from tests.ray.nodes import LOOPBACK, RayNodes
from wire.errors import Unavailable

pytestmark = [
    pytest.mark.long, pytest.mark.cluster, pytest.mark.usefixtures("ray_is_here"),
]  # fmt: skip

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
_AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")  # Ray's own: they notice a killed node after about a minute
_PLACED = re.compile(r"(\S+) is placed on \S+ \(node (\w+)\)")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    made = RayNodes()
    yield made
    made.close()


class RayUp(Pdserve):
    """The command with --ray."""

    def __init__(self, folder: Path, model: Path, nodes: RayNodes) -> None:
        super().__init__(folder, model)
        self.nodes = nodes
        self.environ = dict(LOOPBACK)
        self.added: list[str] = []

    def add(self, count: int = 1, **resources: object) -> None:
        """Add nodes with room for two instances each."""
        self.added += [self.nodes.add(**{"num_cpus": 2, **resources}) for _ in range(count)]

    def kill_node_of(self, name: str) -> str:
        """Kill the node on which an instance was last placed."""
        start = self.places()[name][-1]
        (node_id,) = (one for one in self.added if one.startswith(start))
        self.added.remove(node_id)
        self.nodes.kill(node_id)
        return node_id

    def places(self) -> dict[str, list[str]]:
        """Where each instance was placed, first to last, as the supervisor reports."""
        found: dict[str, list[str]] = {}
        for name, node in _PLACED.findall(self.folder.log("supervisor").read_text()):
            found.setdefault(name, []).append(node)
        return found

    @property
    def flags(self) -> tuple[str, ...]:
        return (*super().flags, "--ray", "--address", self.nodes.address)

    @property
    def table(self) -> list[tuple[str, int | None]]:
        (path,) = self.folder.tables.glob("global_ranktable_*.json")
        return [(one.server.server_ip, one.server.server_port) for one in read_global(str(path)).instances]

    def wait_healed(self, before: ProcessRecord) -> None:
        """Return when an instance serves at another address than before."""
        until(lambda: self.record(before.name).address not in ("", before.address))
        until(lambda: self.record(before.name).address in self._living_addresses())

    def _living_addresses(self) -> set[str]:
        view = self.client.get("/ready").json()
        return {one["address"] for one in view["instances"] if one["state"] == "living"}


@pytest.fixture
def up(tmp_path: Path, fake_model: Path, nodes: RayNodes) -> Iterator[RayUp]:
    command = RayUp(tmp_path / "run", fake_model, nodes)
    yield command
    assert command("down").returncode == 0
    assert command.folder.read() is None
    for node_id in command.added:
        nodes.kill(node_id)


def test_instances_on_different_nodes_serve(up: RayUp) -> None:
    up.add(2)

    started = up.up()

    assert started.returncode == 0, started.stderr
    assert up.client.post("/v1/completions", ASK).status == 200
    places = up.places()
    assert places["prefill-0"] != places["decode-0"]
    assert {len(places[name]) for name in places} == {1}
    assert [f"{ip}:{port}" for ip, port in up.table] == [
        up.record("prefill-0").address, up.record("decode-0").address,
    ]  # fmt: skip
    until(lambda: "serving instance=" in up("logs", "decode-0").stdout)
    status = up("status").stdout.splitlines()
    assert [line.split()[:1] + line.split()[3:5] for line in status[2:4]] == [
        ["prefill-0", "-", "living"], ["decode-0", "-", "living"],
    ]  # fmt: skip


def test_packed_instances_share_a_node(up: RayUp) -> None:
    up.add(2)

    assert up.up("--ray-strategy", "strict-pack").returncode == 0

    places = up.places()
    assert places["prefill-0"] == places["decode-0"]


def test_a_killed_node_is_replaced_and_each_request_ends_once(up: RayUp, tiny_model: Path) -> None:
    up.model, up.engine = tiny_model, ENGINE_FLAGS  # a real model: the same tokens from every instance
    up.add(3)
    started = up.up("--prefill", "1", "--decode", "2")
    assert started.returncode == 0, started.stderr
    expected = up.client_for_long_answers.post("/v1/completions", LONG).json()["choices"][0]["text"]
    before = up.record("decode-1")
    with _Load(up, 6) as load:
        up.kill_node_of("decode-1")
        up.wait_healed(before)
        load.wait_more(12)

    assert load.num_asked == len(load.ended)
    assert {status for status, _ in load.ended} <= {200, 503}
    assert {text for status, text in load.ended if status == 200} == {expected}
    assert up.places()["decode-1"][0] != up.places()["decode-1"][-1]
    until(lambda: _metric_sum(up, "pdserve_kv_blocks_used") == 0)
    assert _metric_sum(up, "pdserve_requests_inflight") == 0
    assert "decode-1 on 127.0.0.1 (node " in up("logs", "supervisor").stdout
    assert len(up.table) == 3


def test_killing_the_only_node_restarts_everything_on_another(up: RayUp) -> None:
    up.add(2)
    assert up.up("--ray-strategy", "pack").returncode == 0
    before = up.record("prefill-0"), up.record("decode-0")

    up.kill_node_of("decode-0")
    for record in before:
        up.wait_healed(record)

    until(lambda: up.client.post("/v1/completions", ASK).status == 200)


def test_an_instance_waits_for_a_node_with_room(up: RayUp) -> None:
    up.add(2, num_cpus=1)
    assert up.up().returncode == 0
    before = up.record("decode-0")

    up.kill_node_of("decode-0")
    up.wait_log("decode-0 again")
    up.add(1, num_cpus=1)
    up.wait_healed(before)

    assert up.client.post("/v1/completions", ASK).status == 200


def test_a_killed_process_is_restarted_in_its_place(up: RayUp) -> None:
    up.add(2)
    assert up.up().returncode == 0
    address = up.record("decode-0").address
    (child,) = _processes_at(address)

    child.kill()
    up.wait_log("decode-0 ended with signal SIGKILL: ")
    until(lambda: bool(_processes_at(address)) and address in up._living_addresses())

    until(lambda: up.client.post("/v1/completions", ASK).status == 200)
    assert up.record("decode-0").address == address
    assert len(set(up.places()["decode-0"])) == 1


def test_a_killed_supervisor_leaves_no_instance_or_reservation(up: RayUp) -> None:
    up.add(1)
    assert up.up().returncode == 0
    watcher, *below = up.everything()
    instances = [process for name in ("prefill-0", "decode-0") for process in _processes_at(up.record(name).address)]
    assert len(instances) == 2

    watcher.kill()

    _, left = psutil.wait_procs([watcher, *below, *instances], timeout=300)
    assert left == []
    assert up("down").stdout == "no cluster is running here\n"
    assert up.up().returncode == 0  # the one node has room again


@pytest.mark.parametrize(
    ("kind", "resources"), [("npu", {"resources": {"NPU": 4}}), ("cuda", {"num_gpus": 4}), ("cpu", {"num_cpus": 4})]
)
def test_an_instances_devices_are_those_that_ray_assigned(
    nodes: RayNodes, kind: str, resources: dict[str, object]
) -> None:
    node_id = nodes.add(**resources)
    command = [sys.executable, "-P", "-m", "tests.ray.place_actors", nodes.address, kind, "2", "2"]
    environ = {**os.environ, **LOOPBACK, "PYTHONPATH": str(Path(__file__).parents[2])}

    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    nodes.kill(node_id)

    assert done.returncode == 0, done.stderr
    placements = [decode(Placement, line) for line in done.stdout.splitlines()]
    assert {placement.node_id for placement in placements} == {node_id}
    given = [device_id for placement in placements for device_id in placement.device_ids]
    assert sorted(given) == (["100", "100", "101", "101"] if kind == "cpu" else ["0", "1", "2", "3"])
    addresses = {address for placement in placements for address in placement.device_ips}
    assert addresses == ({f"192.0.2.1{device_id}" for device_id in "0123"} if kind == "npu" else {"127.0.0.1"})


def test_missing_resources_are_reported_with_the_available_ones(up: RayUp) -> None:
    up.add(1, num_cpus=1)

    refused = up.up("--startup-timeout", "3")

    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()[-1:]
    assert "had no room for 2 instances of 1 CPU each (spread) within 3 s" in line
    assert "with CPU 1 (including those in use)" in line


@pytest.mark.parametrize("token", [None, "f" * 32])
def test_a_client_without_the_clusters_token_is_refused(up: RayUp, token: str | None, tmp_path: Path) -> None:
    up.environ = {**LOOPBACK, "HOME": str(tmp_path)}
    del up.environ["RAY_AUTH_TOKEN"]
    if token is not None:
        up.environ["RAY_AUTH_TOKEN"] = token

    refused = up.up()

    assert refused.returncode == 2
    assert "cannot join the Ray cluster: " in refused.stderr
    assert "oken" in refused.stderr.splitlines()[-1]


class OwnRayUp(Pdserve):
    """The command with --ray and no address."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*super().flags, "--ray")


@pytest.fixture
def own(tmp_path: Path, fake_model: Path) -> Iterator[OwnRayUp]:
    command = OwnRayUp(tmp_path / "run", fake_model)
    yield command
    assert command("down").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_our_own_ray_listens_on_loopback_and_leaves_nothing(own: OwnRayUp, number: int) -> None:
    with own.front() as front:
        try:
            until(own.folder.log("supervisor").exists)
            own.wait_log("ready: ")
            everything = own.everything()
            listening = {ip for process in everything for ip in _listening(process)}
            folders = {Path(match) for process in everything for match in _FOLDER.findall(" ".join(process.cmdline()))}
        finally:
            front.send_signal(number)
        output, _ = front.communicate(timeout=300)

    assert len(everything) >= 6  # gcs_server, raylet, two workers, two instances, the scheduler
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert front.returncode == 0
    assert "starting Ray on this machine, on 127.0.0.1 only" in output
    assert "Ray does not respond" not in output
    _, left = psutil.wait_procs(everything, timeout=300)
    assert left == []
    assert folders
    assert not [folder for folder in folders if folder.exists()]


def test_a_killed_supervisor_ends_its_own_ray(own: OwnRayUp) -> None:
    assert own.up().returncode == 0
    everything = [process for process in own.everything() if process.name() not in _AGENTS]

    everything[0].kill()

    _, left = psutil.wait_procs(everything, timeout=300)
    assert left == []


def test_shutdown_does_not_wait_for_a_lost_head(own: OwnRayUp) -> None:
    with own.front() as front:
        try:
            until(own.folder.log("supervisor").exists)
            own.wait_log("ready: ")
            everything = [process for process in own.everything() if process.name() not in _AGENTS]
            (head,) = (process for process in everything if process.name() == "gcs_server")
            head.kill()
        finally:
            front.send_signal(signal.SIGINT)
        front.communicate(timeout=300)

    _, left = psutil.wait_procs(everything, timeout=300)
    assert left == []
    assert own.folder.read() is None


_FOLDER = re.compile(r"(\S*/pdserve-ray-\w+)/r\b")


def _listening(process: psutil.Process) -> list[str]:
    """Return the addresses that a process listens on."""
    try:
        return [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return []


def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event reports."""
    deadline, event = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition never came"
        event.wait(0.05)


def _processes_at(address: str) -> list[psutil.Process]:
    """Return the processes that listen on an address of this machine."""
    port = int(address.rpartition(":")[2])
    found = (
        one.pid for one in psutil.net_connections("inet")
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    )  # fmt: skip
    return [psutil.Process(pid) for pid in sorted({pid for pid in found if pid is not None})]


def _metric_sum(up: Pdserve, name: str) -> float:
    return sum(sample.value for sample in up.client.metrics() if sample.name == name)


class _Load:
    """Threads that send requests in a loop, all running once the `with` begins; `ended` has statuses and texts."""

    def __init__(self, up: RayUp, count: int) -> None:
        self._up, self._over = up, threading.Event()
        self.num_asked, self.ended = 0, list[tuple[int | None, str]]()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(count)]

    def __enter__(self) -> "_Load":
        for thread in self._threads:
            thread.start()
        until(lambda: _metric_sum(self._up, "pdserve_requests_inflight") == len(self._threads))
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def wait_more(self, count: int) -> None:
        """Return when that many more were answered successfully."""
        wanted = count + sum(status == 200 for status, _ in self.ended)
        until(lambda: sum(status == 200 for status, _ in self.ended) >= wanted)

    def _call(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self.num_asked += 1
            try:
                reply = self._up.client_for_long_answers.post("/v1/completions", LONG)
            except Unavailable:
                self.ended.append((None, ""))
                continue
            text = reply.json()["choices"][0]["text"] if reply.status == 200 else ""
            self.ended.append((reply.status, text))
