"""Sums over ranks: one contract for memory they share and for process groups, and which group belongs to a device."""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from devices.collectives import COLLECTIVES, Collective, collective_named, collective_of
from engine.ranks.load import RanksOptions, load_ranks
from engine.ranks.marks import Marks, make_marks
from engine.ranks.reduce import Sum
from engine.ranks.sums import GroupSum, ReduceFailed, SharedSum, collective_for_ranks
from native.ranks import load as load_sum
from wire.errors import ConfigError
from wire.kv_layout import Rank

_WAIT_S = 300.0
_SIZES = (1, 7, 4096, 300_000)  # the last is more than one slot of shared memory


class DeviceGroup:
    """A group as nccl and hccl are: a sum goes on by itself, and a wait for one whose peer is gone has no end.

    A wait without a time returns at once, as NCCL's does, and reports no failure.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.num_sums = 0
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "DeviceWork":
        self.num_sums += 1
        options.timeout = timedelta(seconds=_WAIT_S)
        return DeviceWork(self._group.allreduce(tensors, options))


class DeviceWork:
    def __init__(self, work: Any) -> None:
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def is_completed(self) -> bool:
        return self._done.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            self._done.result(timeout.total_seconds())

    def _run(self, work: Any) -> None:
        try:
            self._done.set_result(work.wait())
        except RuntimeError as error:
            self._done.set_exception(error)


@dataclasses.dataclass
class Ways:
    """Makes the ends of all ranks, which connect on threads, and keeps them: closing an end is tested elsewhere."""

    way: str
    num_ranks: int
    marks: Marks
    store_fd: int
    groups: list[DeviceGroup] = dataclasses.field(default_factory=list)
    ends: list[Sum] = dataclasses.field(default_factory=list)

    def connect(self, number: int) -> Sum:
        """Return a rank's end once it has met the others."""
        end = self._meet(number)
        self.ends.append(end)
        return end

    def _meet(self, number: int) -> Sum:
        rank = Rank(number, self.num_ranks)
        if self.way == "shared":
            library = load_sum()
            assert library is not None
            return SharedSum(library, rank, self.marks, _WAIT_S)
        return GroupSum(self._collective(), self.store_fd, rank, self.marks, _WAIT_S)

    def _collective(self) -> Collective:
        gloo = COLLECTIVES["gloo"]
        if self.way == "gloo":
            return gloo

        groups = self.groups  # no cycle: gloo's threads may need the GIL that a garbage collection holds meanwhile

        def make(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> DeviceGroup:
            group = DeviceGroup(gloo.make(store, rank, of, host, timeout_s, device))
            groups.append(group)
            return group

        return dataclasses.replace(COLLECTIVES["nccl"], lacking=lambda: None, make=make)


@pytest.fixture
def make_ways(request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], Ways]]:
    fds: list[int] = []

    def make(way: str, num_ranks: int) -> Ways:
        if way == "shared":
            request.getfixturevalue("native_libraries")
        fds.extend((make_marks(num_ranks), os.memfd_create("store")))
        return Ways(way, num_ranks, Marks(fds[-2], num_ranks), fds[-1])

    yield make
    for fd in fds:
        os.close(fd)


T = TypeVar("T")


def _on_all(ways: Ways, work: Callable[[int, Sum], T]) -> list[T]:
    with ThreadPoolExecutor(ways.num_ranks) as pool:
        return [*pool.map(lambda number: work(number, ways.connect(number)), range(ways.num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", ["shared", "gloo", "device"])
def test_all_ranks_have_the_same_sum_time_after_time(
    way: str, num_ranks: int, make_ways: Callable[[str, int], Ways]
) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(num_ranks, size, generator=generator) for size in _SIZES * 3]

    def work(number: int, add_up: Sum) -> list[torch.Tensor]:
        own = [tensors[number].clone() for tensors in given]
        for tensor in own:
            add_up(tensor)
        return own

    summed = _on_all(make_ways(way, num_ranks), work)

    for index, tensors in enumerate(given):
        torch.testing.assert_close(summed[0][index], tensors.sum(0))
        assert all(torch.equal(one[index], summed[0][index]) for one in summed)


@pytest.mark.parametrize("way", ["shared", "gloo", "device"])
def test_tensors_of_16_bits_are_added_up_in_their_own_dtype(way: str, make_ways: Callable[[str, int], Ways]) -> None:
    def work(number: int, add_up: Sum) -> torch.Tensor:
        tensor = torch.tensor([1.0, -2.5, 0.125 * (number + 1)], dtype=torch.bfloat16)
        add_up(tensor)
        return tensor

    summed = _on_all(make_ways(way, 2), work)

    assert all(torch.equal(one, torch.tensor([2.0, -5.0, 0.375], dtype=torch.bfloat16)) for one in summed)


@pytest.mark.parametrize("way", ["shared", "gloo", "device"])
def test_a_sum_that_another_rank_does_not_join_fails_with_a_reason(
    way: str, make_ways: Callable[[str, int], Ways]
) -> None:
    def work(number: int, add_up: Sum) -> str:
        tensor = torch.ones(8)
        add_up(tensor)
        if number == 0:
            add_up._step_s = 0.2  # type: ignore[attr-defined]  # from here on: the first sum took what it took
            with pytest.raises(ReduceFailed) as failed:
                add_up(tensor)
            return str(failed.value)
        return ""

    ways = make_ways(way, 2)
    said = _on_all(ways, work)

    assert [group.is_aborted for group in ways.groups].count(True) == len(ways.groups) // 2
    assert "no sum over the ranks within 0.2 s" in said[0] or "Timed out waiting 200ms" in said[0]
    assert "\n" not in said[0]


def test_a_lost_rank_ends_a_wait_without_a_deadline(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("device", 2)
    both_have_added = threading.Barrier(2, timeout=_WAIT_S)

    def work(number: int, add_up: Sum) -> None:
        add_up(torch.ones(8))
        both_have_added.wait()
        if number == 1:
            ways.marks.abort()
            return
        with pytest.raises(ReduceFailed, match="another rank is lost"):
            add_up(torch.ones(8))

    _on_all(ways, work)


def test_a_sum_that_failed_counts_as_none(make_ways: Callable[[str, int], Ways]) -> None:
    class BrokenGroup:
        """Its sums are over at once, as NCCL's are where a peer is gone."""

        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True

        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "BrokenGroup":
            return self

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: timedelta | None = None) -> None:
            if timeout is not None:
                raise RuntimeError("remote error")

    def work(number: int, add_up: Sum) -> None:
        group = BrokenGroup()
        add_up._group = group  # type: ignore[attr-defined]
        with pytest.raises(ReduceFailed, match="remote error"):
            add_up(torch.ones(8))
        assert group.is_aborted  # else its kernel goes on, and who waits for the device has no end

    _on_all(make_ways("device", 2), work)


def test_a_lazy_group_connects_when_the_ranks_meet(
    make_ways: Callable[[str, int], Ways],
) -> None:
    ways = make_ways("device", 2)

    counts = _on_all(ways, lambda number, add_up: [group.num_sums for group in ways.groups])

    assert all(min(seen) == 1 for seen in counts)


def test_a_rank_that_finds_no_other_raises(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("gloo", 2)
    hasty = dataclasses.replace(COLLECTIVES["gloo"], meet_s=lambda _: 0.2)

    with pytest.raises(ReduceFailed, match="rank 0 of 2 found no other ranks by gloo: "):
        GroupSum(hasty, ways.store_fd, Rank(0, 2), ways.marks, _WAIT_S)


def test_the_device_chooses_how_its_ranks_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, collective in COLLECTIVES.items():
        monkeypatch.setitem(COLLECTIVES, name, dataclasses.replace(collective, lacking=lambda: None))

    named = {device: collective_for_ranks(device).name for device in ("cpu", "cuda", "npu:3")}

    assert named == {"cpu": "gloo", "cuda": "nccl", "npu:3": "hccl"}
    assert all(collective_named(name) is collective for name, collective in COLLECTIVES.items())


def test_a_device_without_process_groups_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = dataclasses.replace(COLLECTIVES["hccl"], lacking=lambda: "torch_npu is not installed")
    monkeypatch.setitem(COLLECTIVES, "hccl", lacking)

    with pytest.raises(
        ConfigError, match="ranks on npu:1 all-reduce over hccl, but torch_npu is not installed: use --tens"
    ):
        collective_for_ranks("npu:1")
    with pytest.raises(ConfigError, match="ranks cannot run on tpu: it has no process groups"):
        collective_for_ranks("tpu")
    with pytest.raises(ConfigError, match="'mpi' is not one of gloo, nccl, hccl"):
        collective_named("mpi")
    assert collective_of("tpu:0") is None


@pytest.mark.parametrize(("device", "name"), [("cuda", "nccl"), ("npu", "hccl")])
def test_ranks_on_a_device_without_sums_are_refused_first(device: str, name: str) -> None:
    options = RanksOptions(cores=((), ()), num_threads=1, device=device)

    with pytest.raises(ConfigError, match=f"ranks on {device} .*all-reduce over {name}, "):
        load_ranks(
            Path("/no/model"), dtype="float32", block_size=16, kv_cache_memory=None, ranks=options,
            on_lost=lambda error: None,
        )  # fmt: skip


def test_a_group_outlives_the_descriptor_that_it_met_by() -> None:
    """torch's store writes to its file by name as it goes; what another owner put there since ended the process."""
    program = """
import fcntl, gc, os, threading
from devices.collectives import COLLECTIVES
from engine.ranks.marks import Marks, make_marks
from engine.ranks.sums import GroupSum
from wire.kv_layout import Rank

marks, store_fd = Marks(make_marks(2), 2), os.memfd_create("store")
ends = []
threads = [
    threading.Thread(target=lambda n=n: ends.append(GroupSum(COLLECTIVES["gloo"], store_fd, Rank(n, 2), marks, 30.0)))
    for n in range(2)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
sealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
os.dup2(sealed, store_fd)
assert len(ends) == 2
ends.clear()
gc.collect()
print("over")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)

    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
