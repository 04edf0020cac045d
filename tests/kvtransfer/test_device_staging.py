"""Staging memory of groups whose pools lie on a device, with CPU tensors as the device's memory."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from devices.collectives import COLLECTIVES
from kvtransfer.device_memory import DeviceRegion
from kvtransfer.device_staging import DeviceStaging
from kvtransfer.digest import Region, RegionRuns, Runs, StopFlag, digest_of
from kvtransfer.link_messages import Frame
from kvtransfer.process_group import payload
from kvtransfer.process_group.payload import GroupStaging, HostStaging, make_staging
from kvtransfer.tcp import TcpInlet
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import DevicePool
from tests.kvtransfer.hccl_on_cpu import hccl_on_cpu
from tests.kvtransfer.hccl_rules import HcclRules
from tests.kvtransfer.rig import DEADLINE_S, Pool, fill, make_rig, read
from wire.errors import Unavailable
from wire.kv_layout import PoolLayout

DATA = random.Random(4).randbytes(100_000)
SHUFFLED = Runs([(4_000, 512, 1_024, 3), (0, 2_048, 0, 1), (30_000, 512, 0, 1)])
WANTED = b"".join(DATA[at : at + 512] for at in (4_000, 5_024, 6_048)) + DATA[:2_048] + DATA[30_000:30_512]


@pytest.fixture(params=["host", "device"])
def staging(request: pytest.FixtureRequest) -> GroupStaging:
    return HostStaging(20_000) if request.param == "host" else DeviceStaging(20_000, "cpu")


def pool(data: bytes) -> DeviceRegion:
    return DeviceRegion(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_runs_of_a_device_pool_are_contiguous_in_the_staging_area(staging: GroupStaging) -> None:
    staging.gather(100, RegionRuns(pool(DATA), 0, SHUFFLED))

    assert staging.tensor(100, len(WANTED)).numpy().tobytes() == WANTED
    assert staging.read(100, len(WANTED)) == WANTED


@pytest.mark.parametrize("digests", [True, False])
def test_received_bytes_reach_the_runs_and_are_digested(staging: GroupStaging, digests: bool) -> None:
    target = pool(bytes(len(DATA)))
    staging.tensor(64, len(WANTED)).copy_(torch.frombuffer(bytearray(WANTED), dtype=torch.uint8))

    digest = staging.scatter(64, RegionRuns(target, 0, SHUFFLED), StopFlag(), digests=digests)

    written = target.tensor.numpy().tobytes()
    assert digest == (digest_of([WANTED]) if digests else 0)
    assert b"".join(written[at : at + 512] for at in (4_000, 5_024, 6_048)) == WANTED[: 3 * 512]
    assert written[:2_048] == DATA[:2_048]
    assert sum(map(bool, written)) == sum(map(bool, WANTED))


def test_a_stopped_scatter_writes_nothing(staging: GroupStaging) -> None:
    target, stop = pool(bytes(len(DATA))), StopFlag()
    staging.write(0, WANTED)
    stop.set()

    assert staging.scatter(0, RegionRuns(target, 0, SHUFFLED), stop, digests=True) is None
    assert not target.tensor.any()


def test_the_proof_of_a_link_is_written_and_read(staging: GroupStaging) -> None:
    staging.write(16, b"0123456789abcdef")

    assert staging.read(16, 16) == b"0123456789abcdef"


def test_each_collective_gets_its_own_kind_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str]] = []
    monkeypatch.setattr(payload, "DeviceStaging", lambda *given: made.append(given))

    assert isinstance(make_staging("cpu", 10, on_host=COLLECTIVES["gloo"].on_host), HostStaging)
    make_staging("cuda:1", 11, on_host=COLLECTIVES["nccl"].on_host)
    make_staging("npu:0", 12, on_host=COLLECTIVES["hccl"].on_host)

    assert made == [(11, "cuda:1"), (12, "npu:0")]


def test_a_full_device_is_unavailable_and_not_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(payload, "DeviceStaging", full)

    with pytest.raises(Unavailable, match="cannot allocate 11 bytes of staging memory on cuda:1: CUDA out of memory"):
        make_staging("cuda:1", 11, on_host=False)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HcclRules]:
    """HCCL's rules over gloo, with pools that report an NPU and whose memory only torch can reach."""
    numbers = itertools.count()

    class NpuPool(DevicePool):
        def __init__(self, layout: PoolLayout, seals: int = 0) -> None:
            super().__init__(layout)
            self.device = f"npu:{next(numbers)}"

    monkeypatch.setattr(rigs, "Pool", NpuPool)
    with hccl_on_cpu(monkeypatch, tmp_path, on_host=False) as made:
        yield made


@pytest.mark.long
def test_hand_offs_between_device_pools_keep_hccls_rules(rules: HcclRules) -> None:
    with make_rig("process_group", num_blocks=256, sender_block=4, receiver_block=16) as rig:
        tokens = [fill(rig.p_pool, range(4 * i, 4 * i + 4), 15, seed=i) for i in range(32)]
        tickets = [rig.open(15, (200 - 3 * i,)) for i in range(32)]
        for i, ticket in enumerate(tickets):
            rig.hand_over(ticket, range(4 * i, 4 * i + 4))
        for ticket in tickets:
            rig.events.wait("acked", ticket.ticket_id)

        assert all(read(rig.d_pool, (200 - 3 * i,), 15) == tokens[i] for i in range(32))
        assert rules.made == 2


@pytest.mark.parametrize(
    ("make_pool", "is_full", "kind"),
    [(DevicePool, False, DeviceRegion), (DevicePool, True, Region), (Pool, False, Region)],
)
def test_a_measurement_ends_in_memory_like_the_pools(
    make_pool: type[DevicePool | Pool], is_full: bool, kind: type[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would leave out what a transport must copy between host and device, or add it."""
    move, targets = TcpInlet.move, []

    def watch(self: TcpInlet, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        targets.append(type(target.region))
        return move(self, frame, target, stop)

    def refuse(self: torch.Tensor, *_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(TcpInlet, "move", watch)
    monkeypatch.setattr(rigs, "Pool", make_pool)
    with make_rig("tcp") as rig:
        if is_full:
            monkeypatch.setattr(torch.Tensor, "new_empty", refuse)
        rig.sender.measure("decode-0", 77, rig.receiver.endpoints, 4 << 10, DEADLINE_S)

    assert set(targets) == {kind}
