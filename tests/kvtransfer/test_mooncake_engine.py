"""When mooncake's engine opens ports, and how long it knows memory: without the package where a stand-in will do."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvtransfer import mooncake
from kvtransfer.mooncake import Registered
from kvtransfer.transports import make_transports
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool
from wire.kv_layout import PoolLayout

NEEDS_MOONCAKE = [mark for one in EVERY_TRANSPORT if one.values[0] == "mooncake" for mark in one.marks]
FIRST_LINK = """
from kvtransfer import mooncake
from tests.kvtransfer.rig import fill, make_rig

with make_rig("mooncake") as rig:
    print(mooncake._open_ports())
    fill(rig.p_pool, range(5), 20)
    ticket = rig.open(20, range(5))
    rig.hand_over(ticket, range(5))
    rig.events.wait("acked", ticket.ticket_id)
    print(mooncake._open_ports())
"""


class Engine:
    """What Registered asks of an engine."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.let_go: list[int] = []
        self.changed = threading.Condition()

    def register_memory(self, address: int, num_bytes: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        with self.changed:
            self.let_go.append(address)
            self.changed.notify_all()
        return 0

    def wait_for(self, *memories: Registered) -> None:
        with self.changed:
            wanted = [memory.staging.address for memory in memories]
            assert self.changed.wait_for(lambda: self.let_go == wanted, DEADLINE_S), self.let_go


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(mooncake, "_PARKED", {})  # links of other tests may still have theirs there
    yield Engine()
    assert not mooncake._PARKED


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    mooncake._warn_of_ports.cache_clear()
    yield
    mooncake._warn_of_ports.cache_clear()


def test_a_ring_of_the_last_link_is_taken_back_after_its_grace(engine: Engine) -> None:
    ring = Registered(engine, 4096)

    ring.close(after_s=0.01)
    ring.close(after_s=0.01)

    engine.wait_for(ring)
    ring.close()
    assert len(engine.let_go) == 1


def test_a_ring_stays_for_its_grace_and_a_close_at_once_ends_that(engine: Engine) -> None:
    ring, other = Registered(engine, 4096), Registered(engine, 4096)

    ring.close(after_s=1_000)
    other.close()
    assert engine.let_go == [other.staging.address]
    (timer,) = mooncake._PARKED.values()
    assert timer.daemon
    assert timer.name == "kv-mooncake-park"
    ring.close()

    engine.wait_for(other, ring)
    timer.join(DEADLINE_S)
    assert not timer.is_alive()


def test_of_too_many_rings_that_wait_the_oldest_goes_at_once(engine: Engine) -> None:
    rings = [Registered(engine, 4096) for _ in range(18)]

    for ring in rings:
        ring.close(after_s=1_000)

    engine.wait_for(*rings[:2])
    for ring in rings[2:]:
        ring.close()


def test_a_ring_is_taken_back_at_once_where_no_thread_can_be_had(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    ring = Registered(engine, 4096)

    ring.close(after_s=1_000)

    engine.wait_for(ring)


@pytest.mark.usefixtures("no_warning_yet")
@pytest.mark.parametrize(("variables", "said"), [
    ({}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "21000", "MC_MAX_RPC_PORT": "21010"}, "21000-21010"),
    ({"MC_MIN_RPC_PORT": "16990"}, "16990-17000"),
    ({"MC_MAX_RPC_PORT": "14000"}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "80", "MC_MAX_RPC_PORT": "15005"}, "15000-17000"),
    ({"MC_MIN_RPC_PORT": "many", "MC_MAX_RPC_PORT": "15005"}, "15000-17000"),
])  # fmt: skip
def test_a_start_warns_of_the_range_once_and_makes_no_engine(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make_engine(host: str) -> object:
        raise AssertionError("an engine before any link")

    monkeypatch.setattr(mooncake, "_lacking", lambda: None)
    monkeypatch.setattr(mooncake, "_make_engine", make_engine)
    for name in mooncake._PORT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pool = Pool(PoolLayout(TENSORS, num_blocks=1, block_size=4))

    for _ in range(2):  # as each rank does
        make_transports(("mooncake", "tcp"), pool, host="10.0.0.18")

    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"mooncake_will_listen host=10.0.0.18 ports={said} ")
    pool.close()


@pytest.mark.parametrize("_", [pytest.param(None, marks=NEEDS_MOONCAKE)])
def test_no_port_is_open_before_the_first_link_and_two_of_the_default_range_after_it(
    _: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in mooncake._PORT_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINK], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    before, after = (line.strip("[]") for line in done.stdout.split("\n")[:2])
    ports = [int(port) for port in after.split(",")]
    assert before == ""
    assert len(ports) == 2
    assert all(15_000 <= port <= 17_000 for port in ports)
