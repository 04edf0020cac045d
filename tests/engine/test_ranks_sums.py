"""Sums over ranks: one contract for memory they share and for process groups, and which group belongs to a device."""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from devices.collectives import COLLECTIVES, collective_named, collective_of
from engine.ranks.launch_watch import LaunchWatch
from engine.ranks.load import RanksOptions, load_ranks
from engine.ranks.marks import Marks, make_marks
from engine.ranks.reduce import Reduce, Sum
from engine.ranks.stream_sum import StreamSum
from engine.ranks.sums import GroupSum, ReduceFailed, SharedSum, collective_for_ranks, join_group
from native.ranks import load as load_sum
from tests.devices.stream import Stream, StreamDevice, stream_collective
from wire.errors import ConfigError
from wire.kv_layout import Rank

_WAIT_S = 300.0
_SIZES = (1, 7, 4096, 300_000)  # the last is more than one slot of shared memory


@dataclasses.dataclass
class Ways:
    """Makes the ends of all ranks, which connect on threads, and keeps them: closing an end is tested elsewhere."""

    way: str
    num_ranks: int
    marks: Marks
    store_fd: int
    streams: list[Stream] = dataclasses.field(default_factory=list)
    ends: list[Sum] = dataclasses.field(default_factory=list)

    def connect(self, number: int) -> Sum:
        """Return a rank's end once it has met the others."""
        end = self._connect(number)
        self.ends.append(end)
        return end

    def shorten_timeout(self) -> None:
        """Let sums on devices hang that are not joined soon."""
        for stream in self.streams:
            stream.join_s = 0.2

    def _connect(self, number: int) -> Sum:
        rank = Rank(number, self.num_ranks)
        if self.way == "shared":
            library = load_sum()
            assert library is not None
            return SharedSum(library, rank, self.marks, _WAIT_S)
        if self.way == "gloo":
            return GroupSum(join_group(COLLECTIVES["gloo"], self.store_fd, rank), rank, self.marks, _WAIT_S)
        stream = Stream()
        self.streams.append(stream)
        collective, device = stream_collective(self.way, stream), StreamDevice(stream=stream)
        return StreamSum(collective, self.store_fd, rank, self.marks, _WAIT_S, device)


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


def _sum(add_up: Sum, tensor: torch.Tensor) -> None:
    """Sum, and wait for it where it is only enqueued."""
    add_up(tensor)
    if isinstance(add_up, StreamSum):
        add_up.wait(add_up.mark())


def _on_all(ways: Ways, work: Callable[[int, Sum], T]) -> list[T]:
    with ThreadPoolExecutor(ways.num_ranks) as pool:
        return [*pool.map(lambda number: work(number, ways.connect(number)), range(ways.num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", ["shared", "gloo", "nccl", "hccl"])
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


@pytest.mark.parametrize("way", ["shared", "gloo", "nccl", "hccl"])
def test_tensors_of_16_bits_are_added_up_in_their_own_dtype(way: str, make_ways: Callable[[str, int], Ways]) -> None:
    def work(number: int, add_up: Sum) -> torch.Tensor:
        tensor = torch.tensor([1.0, -2.5, 0.125 * (number + 1)], dtype=torch.bfloat16)
        add_up(tensor)
        return tensor

    summed = _on_all(make_ways(way, 2), work)

    assert all(torch.equal(one, torch.tensor([2.0, -5.0, 0.375], dtype=torch.bfloat16)) for one in summed)


@pytest.mark.parametrize("way", ["shared", "gloo", "nccl", "hccl"])
def test_a_sum_that_another_rank_does_not_join_fails_with_a_reason(
    way: str, make_ways: Callable[[str, int], Ways]
) -> None:
    def work(number: int, add_up: Sum) -> str:
        tensor = torch.ones(8)
        _sum(add_up, tensor)
        if number == 0:
            for name in ("_step_s", "step_s"):  # counted from here: the first sum may take longer
                setattr(add_up, name, 0.2)
            ways.shorten_timeout()
            with pytest.raises(ReduceFailed) as failed:
                _sum(add_up, tensor)
            return str(failed.value)
        return ""

    ways = make_ways(way, 2)
    messages = _on_all(ways, work)

    assert [stream.aborted for stream in ways.streams].count(True) == (way == "nccl")  # HCCL has none
    assert "no sum over the ranks within 0.2 s" in messages[0] or "Timed out waiting 200ms" in messages[0]
    assert "\n" not in messages[0]


def test_a_lost_rank_ends_a_wait_on_a_device_before_its_deadline(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("nccl", 2)
    both_have_added = threading.Barrier(2, timeout=_WAIT_S)

    def work(number: int, add_up: Sum) -> None:
        assert isinstance(add_up, StreamSum)
        _sum(add_up, torch.ones(8))
        both_have_added.wait()
        if number == 1:
            ways.marks.abort()
            return
        ways.shorten_timeout()
        with pytest.raises(ReduceFailed, match="another rank is lost"):
            _sum(add_up, torch.ones(8))
        with pytest.raises(ReduceFailed, match="another rank is lost"):
            add_up(torch.ones(8))

    _on_all(ways, work)


def test_a_sum_that_cannot_be_enqueued_fails_all_later_ones(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("nccl", 2)

    def work(number: int, add_up: Sum) -> None:
        for stream in ways.streams:
            stream.refused = "NCCL WARN unhandled system error"
        for _ in range(2):
            with pytest.raises(ReduceFailed, match="NCCL WARN unhandled system error"):
                add_up(torch.ones(8))

    _on_all(ways, work)

    assert all(
        stream.aborted for stream in ways.streams
    )  # else a kernel keeps running, and a wait for the device has no end
    assert [stream.log.count("sum") for stream in ways.streams] == [2, 2]


def test_a_launch_that_waits_for_a_lost_rank_ends(make_ways: Callable[[str, int], Ways]) -> None:
    """A device's queue is bounded: a launch behind a sum that hangs waits, on the thread that would watch the sum."""
    ways, now, explained = make_ways("nccl", 2), [100.0], list[str]()

    def explain(reason: str) -> Exception:
        explained.append(reason)
        return OSError(reason)

    def work(number: int, add_up: Sum) -> None:
        if number == 1:
            return
        assert isinstance(add_up, StreamSum)
        watch = LaunchWatch(add_up, explain, clock=lambda: now[0])
        with watch.guard():
            now[0] += _WAIT_S + 1
            assert watch.check(), "the host takes long, as one that compiles does, and the device works"
        ways.shorten_timeout()
        add_up(torch.ones(8))
        add_up.step_s = 0.2
        assert watch.check(), "nothing is launched now"
        with watch.guard():
            assert watch.check(), "its time has not passed"
            now[0] += 1
            assert not watch.check()
            add_up.device.synchronize()  # as a full queue does
        with pytest.raises(ReduceFailed, match=r"no sum over the ranks within 0\.2 s"):
            add_up(torch.ones(8))

    _on_all(ways, work)

    assert explained[0] == "no sum over the ranks within 0.2 s"


def test_a_capture_that_waits_for_a_lost_rank_ends_at_its_own_limit(make_ways: Callable[[str, int], Ways]) -> None:
    """It may take longer than a step, but not forever, even if the device works: one may wait in a call of NCCL's."""
    ways, now = make_ways("nccl", 2), [100.0]

    def work(number: int, add_up: Sum) -> None:
        if number == 1:
            return
        assert isinstance(add_up, StreamSum)
        watch = LaunchWatch(add_up, OSError, clock=lambda: now[0])
        with watch.guard(2 * _WAIT_S):
            now[0] += _WAIT_S + 1
            assert watch.check(), "its time has not passed"
            now[0] += _WAIT_S
            assert not watch.check()
        with pytest.raises(ReduceFailed, match=r"no sum over the ranks within 600 s"):
            add_up(torch.ones(8))

    _on_all(ways, work)


def test_an_abort_that_waits_for_graphs_holds_nobody_up(make_ways: Callable[[str, int], Ways]) -> None:
    """Its graphs are freed by the thread that steps, which waits for the sums that the abort ends."""
    ways = make_ways("nccl", 2)

    def work(number: int, add_up: Sum) -> None:
        assert isinstance(add_up, StreamSum)
        device = add_up.device
        graph = device.capture(lambda: add_up(torch.ones(8)))
        assert str(add_up.fail("another rank is lost")) == "another rank is lost"
        assert device.stream.aborted  # type: ignore[attr-defined]
        with pytest.raises(ReduceFailed, match="another rank is lost"):
            add_up.expect(1)
        del graph

    _on_all(ways, work)


def test_a_replay_counts_all_its_sums_and_fails_as_one_does(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("nccl", 2)

    def work(number: int, add_up: Sum) -> tuple[int, int]:
        assert isinstance(add_up, StreamSum)
        reduce, replayed = Reduce(), 0
        reduce.connect(add_up)
        reduce.sums_per_pass = 4
        reduce.begin()
        with reduce.replaying():
            replayed += 1
        counted = reduce.num_sums
        both_have_counted.wait()
        assert ways.marks.slowest() == ()
        both_have_counted.wait()
        with pytest.raises(OSError, match="no graph"), reduce.replaying():
            raise OSError("no graph")
        add_up.fail("another rank is lost")
        with pytest.raises(ReduceFailed, match="another rank is lost"), reduce.replaying():
            replayed += 1
        return counted, replayed

    both_have_counted = threading.Barrier(2, timeout=_WAIT_S)

    assert _on_all(ways, work) == [(4, 1), (4, 1)]


def test_a_lazy_group_connects_when_the_ranks_meet(
    make_ways: Callable[[str, int], Ways],
) -> None:
    ways = make_ways("nccl", 2)

    counts = _on_all(ways, lambda number, add_up: [stream.log.count("sum") for stream in ways.streams])

    assert counts == [[1, 1], [1, 1]]


def test_a_rank_that_finds_no_other_raises(make_ways: Callable[[str, int], Ways]) -> None:
    ways = make_ways("gloo", 2)
    hasty = dataclasses.replace(COLLECTIVES["gloo"], connect_s=lambda _: 0.2)

    with pytest.raises(ReduceFailed, match="rank 0 of 2 found no other ranks over gloo: "):
        join_group(hasty, ways.store_fd, Rank(0, 2))


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


@pytest.mark.long
def test_a_group_outlives_the_descriptor_that_it_met_by() -> None:
    """torch's store opens its file by name again when it is destroyed: another file of that name ended the process."""
    program = """
import fcntl, gc, os, threading
from devices.collectives import COLLECTIVES
from engine.ranks.marks import Marks, make_marks
from engine.ranks.sums import GroupSum, join_group
from wire.kv_layout import Rank

marks, store_fd = Marks(make_marks(2), 2), os.memfd_create("store")
ends = []

def join(number):
    rank = Rank(number, 2)
    return GroupSum(join_group(COLLECTIVES["gloo"], store_fd, rank), rank, marks, 30.0)

threads = [
    threading.Thread(target=lambda n=n: ends.append(join(n)))
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
