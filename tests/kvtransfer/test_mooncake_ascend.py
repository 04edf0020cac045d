"""Mooncake's `ascend` protocol over a stand-in for its package: its arguments, and its own rules."""

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from devices import npu, table
from devices.device_pool import DevicePool
from kvtransfer import mooncake_engine
from kvtransfer.comparison import Comparison
from kvtransfer.link import Link
from kvtransfer.link_ops import Measured
from kvtransfer.mooncake import MooncakeTransport
from kvtransfer.mooncake_engine import read_method_of
from tests.devices.fake_device import FakeDevice, FakeKind
from tests.kvtransfer import rank_rig, test_far_rank
from tests.kvtransfer import rig as rigs
from tests.kvtransfer import test_contract as contract
from tests.kvtransfer.faulty import hand_over
from tests.kvtransfer.rig import Pool, Rig, fill, make_rig, read, until
from wire.errors import PdserveError
from wire.kv_layout import PoolLayout

P_BLOCKS, D_BLOCKS, NUM_TOKENS = (3, 9, 4, 5, 20), (7, 8, 30, 2, 11), 18
PIECE = 2 << 20


@dataclass
class Machine:
    """Its NPUs: which of them each thread has selected, and the memory that engines have registered."""

    current: threading.local = field(default_factory=threading.local)
    registered: dict[int, int] = field(default_factory=dict)
    started: list[tuple[str, str, str]] = field(default_factory=list)
    reads: int = 0

    def knows(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())


class Package:
    """The package's class; it refuses what the documents of Ascend's engine forbid."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self._machine.started.append((host, metadata, protocol))
        return 0 if self._on_device(protocol) else -1

    def get_rpc_port(self) -> int:
        return 15_018

    def register_memory(self, address: int, num_bytes: int) -> int:
        if address % PIECE or not self._on_device("ascend"):
            return -2
        self._machine.registered[address] = num_bytes
        return 0

    def unregister_memory(self, address: int) -> int:
        if not self._on_device("ascend") or address not in self._machine.registered:
            return -3
        del self._machine.registered[address]
        return 0

    def transfer_sync_read(self, session: str, target: int, source: int, num_bytes: int) -> int:
        known = self._machine.knows(target, num_bytes) and self._machine.knows(source, num_bytes)
        if not known or not self._on_device("ascend"):
            return -4
        ctypes.memmove(target, source, num_bytes)
        self._machine.reads += 1
        return 0

    def _on_device(self, protocol: str) -> bool:
        return protocol == "ascend" and getattr(self._machine.current, "index", None) is not None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine, numbers = Machine(), itertools.count()

    class Npu(FakeDevice):
        def activate(self) -> None:
            machine.current.index = self.index

    class Kind(FakeKind):
        def open(self, index: int = 0) -> Npu:
            return Npu(index, self.traits)

    class NpuPool(DevicePool):
        def __init__(self, layout: PoolLayout, seals: int = 0) -> None:
            super().__init__(layout, Npu(next(numbers), npu.TRAITS))

        @property
        def buffer(self) -> memoryview:
            if sys._getframe(1).f_globals["__name__"].startswith("kvtransfer"):
                return super().buffer
            return memoryview(self.tensor.numpy())  # type: ignore[arg-type]

    stand_in = SimpleNamespace(TransferEngine=lambda: Package(machine))
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(engine=stand_in))
    monkeypatch.setitem(sys.modules, "mooncake.engine", stand_in)
    monkeypatch.setitem(table.KINDS, "npu", Kind(npu.TRAITS))
    monkeypatch.setattr(mooncake_engine, "_make_engine", functools.cache(mooncake_engine.MooncakeEngine))
    monkeypatch.setattr(mooncake_engine, "_RETIRED", {})
    monkeypatch.setattr("kvtransfer.mooncake.lacking", lambda package: None)
    monkeypatch.setattr(rigs, "Pool", NpuPool)
    monkeypatch.setattr(rank_rig, "Pool", NpuPool)
    for name in ("MC_TRANSFER_TIMEOUT", "MC_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "5"))
    yield machine
    until(lambda: not machine.registered)


@pytest.mark.parametrize("digests", [True, False])
def test_a_hand_off_is_read_between_staging_memory_of_the_devices(machine: Machine, digests: bool) -> None:
    with make_rig("mooncake", sender_block=4, receiver_block=16, digests=digests) as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, NUM_TOKENS)
        ticket = rig.open(NUM_TOKENS, D_BLOCKS[:2])

        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, D_BLOCKS[:2], NUM_TOKENS) == tokens
        pools = [(pool.tensor.data_ptr(), pool.layout.total_bytes) for pool in (rig.p_pool, rig.d_pool)]  # type: ignore[attr-defined]
        assert not any(machine.knows(*pool) for pool in pools)  # never a pool

    assert machine.started == [("127.0.0.1", "P2PHANDSHAKE", "ascend")] * 2
    assert machine.reads > 0


@pytest.mark.parametrize("claim", [
    contract.test_chunks_and_layers_may_come_in_any_order, contract.test_begin_put_and_commit_are_idempotent,
    contract.test_two_tickets_at_once_do_not_mix, contract.test_blocks_that_change_during_the_hand_off_never_commit,
    contract.test_a_sender_that_dies_ends_its_tickets_at_once,
    contract.test_an_abort_by_the_receiver_reaches_the_sender,
])  # fmt: skip
def test_the_contract_holds_between_npus(machine: Machine, claim: Callable[[Rig], None]) -> None:
    with make_rig("mooncake") as rig:
        claim(rig)


@pytest.mark.parametrize("claim", [
    contract.test_sixty_four_tickets_at_once_all_arrive, contract.test_a_corrupt_frame_is_resent_once_and_arrives,
])  # fmt: skip
def test_rigs_of_the_contract_work_between_npus(machine: Machine, claim: Callable[[str], None]) -> None:
    claim("mooncake")


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 2), (2, 1), (1, 2), (2, 4)])
def test_ranks_of_npus_hand_over_every_head(machine: Machine, p_ranks: int, d_ranks: int) -> None:
    test_far_rank.test_every_head_of_every_token_lands_in_its_slot("mooncake", p_ranks, d_ranks, heads=3)

    assert len(machine.started) == p_ranks + d_ranks  # an engine for each rank's device


def test_it_carries_prompts_of_npus_once_it_was_measured_faster(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_faster(new: Link, used: Link, clock: object, done: Callable[[Comparison], None]) -> None:
        done(Comparison(new, used, Measured(1e-3, 2e9), 1e9))

    monkeypatch.setattr("kvtransfer.peer.compare", is_faster)
    both = ("ascend", "tcp")
    with make_rig("mooncake", sender_transports=both, receiver_transports=both) as rig:
        assert hand_over(rig) == "tcp"
        assert machine.reads == 0
        until(lambda: rig.sender.links()[0].transport == "mooncake")
        tokens = fill(rig.p_pool, range(20, 25), 20)

        assert hand_over(rig, 20) == "mooncake"
        assert read(rig.d_pool, range(20, 25), 20) == tokens
        assert rig.sender.links()[0].passed_over == ("tcp: slower than mooncake (1.00 GB/s against 2.00 GB/s)",)


def test_ends_that_read_in_other_ways_refuse_the_link_with_both(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    of_npu = rigs.Pool

    def pool(*given: object) -> object:
        made.append(Pool(*given) if made else of_npu(*given))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(rigs, "Pool", pool)
    with make_rig("mooncake") as rig:
        ticket = rig.open(NUM_TOKENS, D_BLOCKS)
        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("failed", ticket.ticket_id)

        error: PdserveError = rig.events.failures[ticket.ticket_id]
        assert "mooncake uses tcp on cpu, but the sender uses ascend" in str(error)


def test_each_device_kind_has_its_own_way_of_reading_and_package() -> None:
    ways = [read_method_of(device) for device in ("cpu", "cuda:1", "npu:0")]

    assert [way.protocol for way in ways] == ["tcp", "tcp", "ascend"]
    assert [way.package for way in ways] == [
        "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-npu",
    ]  # fmt: skip
    assert [way.on_host for way in ways] == [True, True, False]


def test_a_missing_npu_part_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnNpu(Pool):
        device = "npu:0"

    requests: list[str] = []
    monkeypatch.setattr("kvtransfer.mooncake.lacking", lambda package: requests.append(package))
    pool = OnNpu(PoolLayout(rigs.TENSORS, num_blocks=1, block_size=4))

    MooncakeTransport(pool).unusable()

    assert requests == ["mooncake-transfer-engine-npu"]
    pool.close()
