"""A touched pool has its pages, keeps its bytes, and takes no memory that is not available."""

import os
from collections.abc import Iterator

import pytest

from devices.host_pool import HostPool
from engine.kv.pool_prefault import PoolTouch
from wire.kv_layout import KvTensor, PoolLayout

DEADLINE_S = 300.0  # the touching thread yields to all others
PLENTY = 1 << 40
LAYOUT = PoolLayout(
    (KvTensor(0, "k", 8, 64, "float32"), KvTensor(0, "v", 8, 64, "float32")), num_blocks=300, block_size=16
)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool(LAYOUT) as made:
        yield made


def resident_bytes(pool: HostPool) -> int:
    assert pool.fd is not None
    return os.fstat(pool.fd).st_blocks * 512


def test_every_page_is_touched_and_data_stays(pool: HostPool) -> None:
    pool.buffer[5000:5004] = b"kept"
    touch = PoolTouch(pool, available=lambda: PLENTY)
    touch.start()

    assert touch.join(DEADLINE_S)
    assert resident_bytes(pool) >= LAYOUT.total_bytes
    assert bytes(pool.buffer[5000:5004]) == b"kept"


def test_it_stops_where_memory_is_short(pool: HostPool) -> None:
    answers = iter([PLENTY, PLENTY, 0])
    touch = PoolTouch(pool, available=lambda: next(answers))
    touch.start()

    assert touch.join(DEADLINE_S)
    assert 8 << 20 <= resident_bytes(pool) < LAYOUT.total_bytes


def test_a_stopped_one_releases_the_pool(pool: HostPool) -> None:
    touch = PoolTouch(pool, available=lambda: PLENTY)
    touch.start()
    touch.stop()
    assert touch.join(DEADLINE_S)
    pool.close()

    with pytest.raises(ValueError, match="released"):
        len(pool.buffer)


def test_one_that_never_started_can_be_stopped(pool: HostPool) -> None:
    PoolTouch(pool).stop()

    assert resident_bytes(pool) == 0
