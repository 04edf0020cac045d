"""Large moves between pools that differ in runs and alignment, by every kernel of this CPU."""

import random

import pytest
import xxhash

from native.memory import MemoryRun, Region, RegionRuns, Runs, StopFlag
from native.move_library import Library, build

POOL_BYTES = 1 << 20


@pytest.fixture(scope="module", params=range(4))
def library(request: pytest.FixtureRequest, native_libraries: None) -> Library:
    best = build()
    if request.param not in best.kernels:
        pytest.skip(f"this CPU has no kernel {request.param}, it has {best.kernels}")
    return Library(best.path, kernel=request.param)


def cut(rng: random.Random, num_bytes: int, sizes: list[int], align: int) -> list[MemoryRun]:
    """Cut `num_bytes` into runs of these sizes, in any order, with gaps that are multiples of `align`."""
    runs, offset = [], rng.randrange(3) * align
    while num_bytes:
        size = min(rng.choice(sizes), num_bytes)
        runs.append(MemoryRun(offset, size))
        offset += -(-size // align) * align + rng.randrange(3) * align
        num_bytes -= size
    rng.shuffle(runs)
    return runs


def gather(memory: bytes | bytearray, runs: list[MemoryRun]) -> bytes:
    return b"".join(memory[run.offset : run.offset + run.row_bytes] for run in runs)


@pytest.mark.combinations(2)
@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize(
    ("sizes", "align"),
    [
        ([6144], 64),  # single blocks
        ([4096, 8192, 65_536], 4096),
        ([64, 128, 1024, 1088, 9000], 64),
        ([1, 63, 1000, 6143, 20_000], 1),  # no two sizes or alignments match
    ],
)
def test_moved_bytes_arrive_and_nothing_else_changes(
    library: Library, sizes: list[int], align: int, digest: bool
) -> None:
    rng = random.Random(f"{sizes} {align}")
    data, before = rng.randbytes(POOL_BYTES), rng.randbytes(POOL_BYTES)
    for num_bytes in (20_000, 98_304, 300_001):
        sources, targets = cut(rng, num_bytes, sizes, align), cut(rng, num_bytes, sizes[::-1], align)
        memory, wanted = bytearray(before), bytearray(before)
        content, at = gather(data, sources), 0
        for run in targets:
            wanted[run.offset : run.offset + run.row_bytes] = content[at : at + run.row_bytes]
            at += run.row_bytes
        source, target = RegionRuns(Region(data), 0, Runs(sources)), RegionRuns(Region(memory), 0, Runs(targets))

        if digest:
            assert library.copy_and_digest(source, target, StopFlag()) == xxhash.xxh3_64_intdigest(content)
        else:
            assert library.copy(source, target, StopFlag())

        assert memory == wanted
