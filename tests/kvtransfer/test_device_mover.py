"""The contract of movers (test_digest.py) over TorchMover, with tensors on the CPU as the device's memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Mover, PythonMover, Region, RegionRuns, Runs, StopFlag
from kvtransfer.mover import AnyMover, process_mover
from kvtransfer.row_plan import plan_rows
from kvtransfer.stream import LinkLost
from kvtransfer.torch_mover import TorchMover, _Workspace
from tests.examples import examples
from tests.kvtransfer.lifted import LiftedMover
from tests.kvtransfer.test_digest import (  # noqa: F401  the tests, run here with this file's `mover`
    DATA,
    bytes_of,
    test_a_flag_set_in_the_middle_is_seen_within_256_kib,
    test_a_read_only_mapping_is_a_source_and_no_target,
    test_a_set_flag_stops_a_move_before_its_first_byte,
    test_bytes_cut_differently_are_copied_in_order_and_digested,
    test_heads_of_a_shuffled_pool_reach_the_other_pool,
    test_large_runs_are_exact_at_any_alignment,
    test_runs_past_their_region_are_refused_with_both_numbers,
    test_the_digest_is_that_of_xxhash_for_every_length_to_5000,
    test_the_digest_is_that_of_xxhash_for_every_short_length,
    test_unequal_sizes_are_refused_with_both_numbers,
)

CPU = torch.device("cpu")
MOVES = {"device to device": ("cpu", "cpu"), "host to device": (None, "cpu"), "device to host": ("cpu", None)}


@pytest.fixture(scope="module", params=list(MOVES))
def mover(request: pytest.FixtureRequest) -> Mover:
    return LiftedMover(*MOVES[request.param])


def device(data: bytes, readonly: bool = False, ready: Callable[[], None] | None = None) -> DeviceRegion:
    return DeviceRegion(torch.frombuffer(bytearray(data), dtype=torch.uint8), readonly=readonly, ready=ready)


def all_of(region: Region) -> RegionRuns:
    return RegionRuns(region, 0, Runs([(0, region.num_bytes, 0, 1)]))


@st.composite
def block_tables(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[int, int]]]:
    """Draw base, slot bytes, skip, row bytes and spans of slots as a pool has them."""
    unit = draw(st.sampled_from([1, 4, 8, 64, 96]))
    heads = draw(st.integers(1, 6))
    first = draw(st.integers(0, heads - 1))
    count = draw(st.integers(1, heads - first))
    blocks = draw(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=20))
    size = draw(st.sampled_from([1, 3, 16]))
    last = draw(st.integers(1, size))  # tokens of the last block
    spans = [(block * size, size) for block in blocks[:-1]] + [(blocks[-1] * size, last)]
    return draw(st.sampled_from([0, 4096, 40])), heads * unit, first * unit, count * unit, spans


@examples(50)
@given(block_tables(), st.sampled_from([64, 1000, 4096, 1 << 20]))
def test_heads_of_any_block_table_are_moved_whatever_the_piece_size(
    table: tuple[int, int, int, int, list[tuple[int, int]]], piece_bytes: int
) -> None:
    base, slot_bytes, skip, row_bytes, spans = table
    runs = Runs.of_slots(spans, slot_bytes, skip=skip, row_bytes=row_bytes)
    flat = [(base + first * slot_bytes + skip, row_bytes, slot_bytes, count) for first, count in spans]
    wanted, mover = bytes_of(DATA, 0, flat), TorchMover(piece_bytes)
    source, line = RegionRuns(device(DATA[:500_000]), base, runs), device(bytes(len(wanted)))
    back = device(bytes(500_000))

    digest = mover.copy_and_digest(source, all_of(line), StopFlag())
    returned = mover.copy_and_digest(all_of(line), RegionRuns(back, base, runs), StopFlag())

    assert line.tensor.numpy().tobytes() == wanted
    assert digest == returned == xxhash.xxh3_64_intdigest(wanted)
    assert bytes_of(back.tensor.numpy().tobytes(), 0, flat) == wanted
    assert int(back.tensor.count_nonzero()) == len(wanted) - wanted.count(0)


@pytest.mark.parametrize(
    ("spans", "kernels"),
    [([(0, 64)], 1), ([(0, 16), (32, 16), (64, 16)], 1), ([(48, 16), (0, 16), (16, 16), (112, 16), (64, 7)], 1)],
)
def test_a_pool_is_gathered_by_one_kernel_per_piece(
    spans: list[tuple[int, int]], kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, stage = torch.arange(128 * 96, dtype=torch.int64).to(torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    runs = Runs.of_slots(spans, 96, skip=32, row_bytes=32)
    calls = []
    copy, select = torch.Tensor.copy_, torch.index_select
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given: calls.append("copy") or copy(*given))  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch, "index_select", lambda *given, out: calls.append("select") or select(*given, out=out))  # type: ignore[func-returns-value]

    (plan,) = plan_rows(runs, 4096, 1 << 20, CPU)
    plan.gather(memory, 0, stage)

    assert len(calls) == kernels
    assert stage[: plan.num_bytes].numpy().tobytes() == bytes_of(
        memory.numpy().tobytes(), 0, [(first * 96 + 32, 32, 96, count) for first, count in spans]
    )


def test_the_engine_is_awaited_before_a_byte_is_read() -> None:
    region = device(bytes(1000))

    def ready() -> None:
        region.tensor.fill_(7)

    region.ready = ready
    target = bytearray(1000)

    assert TorchMover().digest(all_of(region)) == xxhash.xxh3_64_intdigest(b"\7" * 1000)
    region.tensor.zero_()
    assert TorchMover().copy(all_of(region), all_of(Region(target)), StopFlag())
    assert target == b"\7" * 1000


def test_digested_bytes_are_the_written_ones_if_the_source_changes() -> None:
    source, target = device(DATA[:1000]), device(bytes(1000))
    mover = TorchMover()
    changed: list[int] = []

    class Changing(StopFlag):
        """Polled before the only piece and after it."""

        def is_set(self) -> bool:
            if changed:
                source.tensor.zero_()
            changed.append(1)
            return False

    digest = mover.copy_and_digest(all_of(source), all_of(target), Changing())

    assert digest == xxhash.xxh3_64_intdigest(target.tensor.numpy().tobytes()) == xxhash.xxh3_64_intdigest(DATA[:1000])


def test_host_access_to_device_memory_raises() -> None:
    region = device(bytes(100))

    for move in (PythonMover().digest, lambda place: place.region.address, lambda place: place.region.view):
        with pytest.raises(TypeError, match="memory on cpu has no"):
            move(all_of(region))


def test_a_region_is_contiguous_bytes() -> None:
    for tensor in (torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous bytes"):
            DeviceRegion(tensor)


def test_this_processs_mover_uses_the_right_mover_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, target = process_mover(), device(bytes(len(DATA)))
    wanted = xxhash.xxh3_64_intdigest(DATA)

    assert mover.digest(all_of(Region(DATA))) == mover.digest(all_of(device(DATA))) == wanted
    assert mover.copy_and_digest(all_of(Region(DATA)), all_of(target), StopFlag()) == wanted
    assert mover.copy(all_of(target), all_of(Region(bytearray(len(DATA)))), StopFlag())
    monkeypatch.setattr("kvtransfer.mover._device_mover", lambda: pytest.fail("host memory needs no torch"))
    assert AnyMover(PythonMover()).digest(all_of(Region(DATA))) == wanted


class NeverDone:
    """An event of a stream that, once queried, waits for something that never comes."""

    def __init__(self) -> None:
        self._queried = False

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        self._queried = True
        return False

    def synchronize(self) -> None:
        assert not self._queried, "this wait has no end"


@pytest.mark.parametrize("what", ["digest", "copy", "copy_and_digest"])
def test_an_event_that_is_never_ready_is_awaited_up_to_the_limit(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, held_up = TorchMover(ready_s=0.05), device(bytes(1000), ready=lambda: None)
    target = bytearray(1000)
    made = _Workspace.__init__

    def stuck(self: _Workspace, *given: Any) -> None:
        made(self, *given)
        self._event = NeverDone()

    arguments = () if what == "digest" else (all_of(Region(target)), StopFlag())
    with monkeypatch.context() as patch:
        patch.setattr(_Workspace, "__init__", stuck)
        with pytest.raises(LinkLost, match=r"KV on cpu was not ready to be read within 0\.05 s"):
            getattr(mover, what)(all_of(held_up), *arguments)

    assert target == bytes(1000)
    assert mover.digest(all_of(held_up)) == xxhash.xxh3_64_intdigest(bytes(1000)), "on a stream that is not held up"
