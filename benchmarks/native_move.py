"""Native copies and digests against one thread's plain memcpy of the same bytes, and the cost of a call.

    python benchmarks/native_move.py [--mib 64 256] [--repeats 9] [--no-native]

Every measure is taken once in every round, so that other load on the machine affects all alike; the
medians are printed. The pools are touched beforehand; from 64 MiB on they exceed the caches of a core.
"""

import argparse
import ctypes
import functools
import mmap
import random
import statistics
import threading
import time
from collections.abc import Callable

from kvtransfer.digest import Mover, PythonMover, Region, RegionRuns, Runs, StopFlag
from native.move_library import build

MIB = 1 << 20
SLOT_BYTES, BLOCK_SLOTS = 384, 16  # a block of 6 KiB
HEAD_BYTES = 128
FRAME_BYTES = 3 * MIB  # 512 blocks: what one frame of a fragmented pool may hold
Work = Callable[[], object]


class Pools:
    """Two pools of one size, and the moves between them."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.source, self.target = _pool(num_bytes), _pool(num_bytes)
        blocks = num_bytes // (SLOT_BYTES * BLOCK_SLOTS)
        self._orders = [random.Random(seed).sample(range(blocks), blocks) for seed in (1, 2)]

    def contiguous(self, frame_bytes: int) -> list[tuple[RegionRuns, RegionRuns]]:
        """Return moves that cover the pools from end to end."""
        frame_bytes = min(frame_bytes, self.num_bytes)
        runs = Runs([(0, frame_bytes, 0, 1)])
        bases = range(0, self.num_bytes - frame_bytes + 1, frame_bytes)
        return [(RegionRuns(self.source, base, runs), RegionRuns(self.target, base, runs)) for base in bases]

    def fragmented(self, row_bytes: int) -> list[tuple[RegionRuns, RegionRuns]]:
        """Return moves of shuffled single blocks, `row_bytes` of every slot."""
        count, moves = FRAME_BYTES // (SLOT_BYTES * BLOCK_SLOTS), []
        for first in range(0, len(self._orders[0]), count):
            runs = [
                Runs.of_slots(
                    [(block * BLOCK_SLOTS, BLOCK_SLOTS) for block in order[first : first + count]],
                    SLOT_BYTES, row_bytes=row_bytes,
                )
                for order in self._orders
            ]  # fmt: skip
            moves.append((RegionRuns(self.source, 0, runs[0]), RegionRuns(self.target, 0, runs[1])))
        return moves


def _pool(num_bytes: int) -> Region:
    memory = memoryview(mmap.mmap(-1, num_bytes))
    page = random.Random(0).randbytes(MIB)
    for at in range(0, num_bytes, MIB):
        memory[at : at + MIB] = page[: num_bytes - at]
    return Region(memory)


def in_turn(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function; they run in turn, and the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def copies(mover: Mover, moves: list[tuple[RegionRuns, RegionRuns]], *, digest: bool) -> Work:
    """Return a function that makes all the moves."""
    stop, move = StopFlag(), mover.copy_and_digest if digest else mover.copy
    return lambda: [move(source, target, stop) for source, target in moves]


def rates(mover: Mover, size_mib: int, repeats: int) -> None:
    """Print GB/s of every kind of move of one pool size."""
    pools = Pools(size_mib * MIB)
    whole = pools.contiguous(pools.num_bytes)
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    kinds = {
        "one run": whole,
        "frames of 3 MiB": pools.contiguous(FRAME_BYTES),
        "frames of 192 KiB": pools.contiguous(192 << 10),
        "single blocks of 6 KiB": pools.fragmented(SLOT_BYTES),
        "rows of 128 B in 384": pools.fragmented(HEAD_BYTES),
    }
    memcpy = functools.partial(libc.memcpy, pools.target.address, pools.source.address, pools.num_bytes)
    works: dict[str, Work] = {"memcpy": memcpy}
    moved = {"memcpy": pools.num_bytes}
    for kind, moves in kinds.items():
        for what, digest in (("copy", False), ("copy + digest", True)):
            works[f"{what}, {kind}"] = copies(mover, moves, digest=digest)
            moved[f"{what}, {kind}"] = sum(source.runs.num_bytes for source, _ in moves)
    works["digest, one run"] = lambda: [mover.digest(source) for source, _ in whole]
    moved["digest, one run"] = pools.num_bytes
    seconds = in_turn(works, repeats)
    plain = pools.num_bytes / seconds["memcpy"]
    for name, took in seconds.items():
        rate = moved[name] / took
        print(f"{size_mib:5} MiB  {name:40} {rate / 1e9:7.2f} GB/s  {rate / plain:6.0%} of memcpy")
    for what in ("copy", "copy + digest"):
        ratio = seconds[f"{what}, single blocks of 6 KiB"] / seconds[f"{what}, frames of 3 MiB"]
        print(
            f"{size_mib:5} MiB  {what}: single blocks take {ratio:.2f} x a contiguous pool's time, in frames of 3 MiB"
        )


def calls(mover: Mover, repeats: int) -> None:
    """Print the cost of calls: the smallest, and 60 frames of 4 single blocks with all their Python code."""
    pools, stop = Pools(8 * MIB), StopFlag()
    tiny = Runs([(0, 64, 0, 1)])
    source, target = RegionRuns(pools.source, 0, tiny), RegionRuns(pools.target, 0, tiny)
    spans = [(block * 3 * BLOCK_SLOTS, BLOCK_SLOTS) for block in range(4)]

    def small() -> None:
        for _ in range(1000):
            mover.copy_and_digest(source, target, stop)

    def hand_off() -> None:
        left, right = Runs.of_slots(spans, SLOT_BYTES), Runs.of_slots(spans[::-1], SLOT_BYTES)
        for tensor in range(60):
            base = tensor * 128 * 1024
            mover.copy_and_digest(RegionRuns(pools.source, base, left), RegionRuns(pools.target, base, right), stop)

    def build() -> None:
        Runs.of_slots(((block, BLOCK_SLOTS) for block in range(4096)), SLOT_BYTES)

    seconds = in_turn({"small": small, "hand_off": hand_off, "build": build}, repeats)
    print(f"a call, 64 bytes                 {seconds['small'] * 1e3:8.2f} us")
    print(f"60 frames of 4 blocks of 6 KiB   {seconds['hand_off'] * 1e6:8.1f} us")
    print(f"runs of 4,096 single blocks      {seconds['build'] * 1e6:8.1f} us, once for all tensors")


def beside(mover: Mover, size_mib: int) -> None:
    """Print the relative speed of another Python thread while this one copies."""
    pools, done = Pools(size_mib * MIB), threading.Event()
    moves, turns = pools.contiguous(FRAME_BYTES), [0]

    def count() -> None:
        while not done.is_set():
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    rates = []
    works: tuple[Work, ...] = (lambda: time.sleep(0.3), lambda: _repeat_for(0.3, copies(mover, moves, digest=True)))
    for work in works:
        before, started = turns[0], time.perf_counter()
        work()
        rates.append((turns[0] - before) / (time.perf_counter() - started))
    done.set()
    thread.join()
    print(f"another Python thread runs at    {rates[1] / rates[0]:8.0%} while this one copies and digests")


def _repeat_for(seconds: float, work: Work) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work()


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="pool sizes")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--no-native", action="store_true", help="measure the fallback in Python")
    options = parser.parse_args()
    mover: Mover = PythonMover() if options.no_native else build()
    print(f"mover: {mover.name}, kernel {getattr(mover, 'kernel', None)}")
    for size_mib in options.mib:
        rates(mover, size_mib, options.repeats)
    calls(mover, options.repeats)
    beside(mover, options.mib[0])


if __name__ == "__main__":
    main()
