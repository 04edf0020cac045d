"""When mooncake's engine opens ports, and how long it keeps memory: without the package where a stand-in is enough."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvtransfer import mooncake_engine
from kvtransfer.mooncake_engine import MooncakeEngine, Registered
from kvtransfer.staging import Staging
from kvtransfer.transport_table import make_transports
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool
from wire.kv_layout import PoolLayout

NEEDS_MOONCAKE = [mark for one in EVERY_TRANSPORT if one.values[0] == "mooncake" for mark in one.marks]
FIRST_LINK = """
from kvtransfer.mooncake_engine import open_ports
from tests.kvtransfer.rig import fill, make_rig

with make_rig("mooncake") as rig:
    print(open_ports())
    fill(rig.p_pool, range(5), 20)
    ticket = rig.open(20, range(5))
    rig.hand_over(ticket, range(5))
    rig.events.wait("acked", ticket.ticket_id)
    print(open_ports())
"""


class Package:
    """The part of mooncake's own class that Engine uses; `status` is what the next calls return."""

    def __init__(self) -> None:
        self.status = 0
        self.let_go: list[int] = []
        self.changed = threading.Condition()

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return self.status

    def get_rpc_port(self) -> int:
        return 15_018

    def register_memory(self, address: int, num_bytes: int) -> int:
        return self.status

    def unregister_memory(self, address: int) -> int:
        with self.changed:
            self.let_go.append(address)
            self.changed.notify_all()
        return self.status

    def transfer_sync_read(self, session: str, target: int, source: int, num_bytes: int) -> int:
        return self.status

    def wait_for(self, *memories: Registered) -> None:
        with self.changed:
            wanted = [memory.staging.address for memory in memories]
            assert self.changed.wait_for(lambda: self.let_go == wanted, DEADLINE_S), self.let_go


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    stand_in = SimpleNamespace(TransferEngine=lambda: package)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(engine=stand_in))
    monkeypatch.setitem(sys.modules, "mooncake.engine", stand_in)
    for name in ("MC_TRANSFER_TIMEOUT", "MC_LOG_LEVEL"):  # set at an engine's start: not for the tests after this one
        monkeypatch.setenv(name, os.environ.get(name, "5"))
    return package


@pytest.fixture
def engine(package: Package, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeEngine]:
    monkeypatch.setattr(mooncake_engine, "_RETIRED", {})  # links of other tests may still have theirs there
    yield MooncakeEngine("10.0.0.18")
    assert not mooncake_engine._RETIRED


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    mooncake_engine.warn_about_ports.cache_clear()
    yield
    mooncake_engine.warn_about_ports.cache_clear()


def test_a_refusal_of_the_engine_is_an_error_with_a_reason(engine: MooncakeEngine, package: Package) -> None:
    memory = Registered(engine, 4096).staging
    package.status = -7

    with pytest.raises(OSError, match=r"mooncake's engine failed to start at 10\.0\.0\.19: -7"):
        MooncakeEngine("10.0.0.19")
    with pytest.raises(OSError, match="the engine did not register 8192 bytes of staging memory: -7"):
        Registered(engine, 8192)
    with pytest.raises(OSError, match=r"mooncake could not read 100 bytes at 10\.0\.0\.20:15001: -7"):
        engine.read("10.0.0.20:15001", memory, 1 << 40, 100)


def test_memory_the_engine_does_not_release_stays_mapped(
    engine: MooncakeEngine, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Staging] = []
    monkeypatch.setattr(mooncake_engine, "_KEPT", kept)
    ring = Registered(engine, 4096)
    package.status = -7

    ring.close()
    ring.close()

    assert kept == [ring.staging]
    assert len(package.let_go) == 1
    assert "mooncake_memory_leaked bytes=4096" in caplog.text


def test_a_peer_gets_the_engines_address(engine: MooncakeEngine) -> None:
    assert engine.session == "10.0.0.18:15018"


def test_a_ring_of_the_last_link_is_released_after_its_grace(engine: MooncakeEngine, package: Package) -> None:
    ring = Registered(engine, 4096)

    ring.close(after_s=0.01)
    ring.close(after_s=0.01)

    package.wait_for(ring)
    ring.close()
    assert len(package.let_go) == 1


def test_a_ring_stays_for_its_grace_and_a_close_at_once_ends_that(engine: MooncakeEngine, package: Package) -> None:
    ring, other = Registered(engine, 4096), Registered(engine, 4096)

    ring.close(after_s=1_000)
    other.close()
    assert package.let_go == [other.staging.address]
    (timer,) = mooncake_engine._RETIRED.values()
    assert timer.daemon
    assert timer.name == "kv-mooncake-park"
    ring.close()

    package.wait_for(other, ring)
    timer.join(DEADLINE_S)
    assert not timer.is_alive()


def test_of_too_many_waiting_rings_the_oldest_is_released_at_once(engine: MooncakeEngine, package: Package) -> None:
    rings = [Registered(engine, 4096) for _ in range(18)]

    for ring in rings:
        ring.close(after_s=1_000)

    package.wait_for(*rings[:2])
    for ring in rings[2:]:
        ring.close()


def test_a_ring_is_released_at_once_if_no_thread_can_be_started(
    engine: MooncakeEngine, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    ring = Registered(engine, 4096)

    ring.close(after_s=1_000)

    package.wait_for(ring)


@pytest.mark.usefixtures("no_warning_yet")
@pytest.mark.parametrize(("variables", "message"), [
    ({}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "21000", "MC_MAX_RPC_PORT": "21010"}, "21000-21010"),
    ({"MC_MIN_RPC_PORT": "16990"}, "16990-17000"),
    ({"MC_MAX_RPC_PORT": "14000"}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "80", "MC_MAX_RPC_PORT": "15005"}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "many", "MC_MAX_RPC_PORT": "15005"}, "15000-17000"),
])  # fmt: skip
def test_a_start_warns_of_the_range_once_and_makes_no_engine(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make_engine(host: str) -> object:
        raise AssertionError("an engine before any link")

    monkeypatch.setattr("kvtransfer.mooncake.lacking", lambda _: None)
    monkeypatch.setattr(mooncake_engine, "_make_engine", make_engine)
    for name in mooncake_engine._PORT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pool = Pool(PoolLayout(TENSORS, num_blocks=1, block_size=4))

    for _ in range(2):  # as each rank does
        make_transports(("mooncake", "tcp"), pool, host="10.0.0.18")

    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"mooncake_will_listen host=10.0.0.18 ports={message} ")
    pool.close()


@pytest.mark.parametrize("_", [pytest.param(None, marks=NEEDS_MOONCAKE)])
def test_ports_open_with_the_first_link(_: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in mooncake_engine._PORT_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINK], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.findall(r"^I\d{4} .*", done.stderr, re.MULTILINE) == []  # its log level is read as it is imported
    before, after = (line.strip("[]") for line in done.stdout.split("\n")[:2])
    ports = [int(port) for port in after.split(",")]
    assert before == ""
    assert len(ports) == 2
    assert all(15_000 <= port <= 17_000 for port in ports)
