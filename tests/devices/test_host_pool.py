"""Host pool: writable by its owner, read-only for other holders of its descriptor."""

import mmap
import os

import pytest

from devices.host_pool import HostPool
from tests.devices.open_files import File, file_of, open_files
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

LAYOUT = PoolLayout([KvTensor(0, "k", 2, 4, "float32")], num_blocks=4, block_size=4)


def fd_of(pool: HostPool) -> int:
    assert pool.fd is not None
    return pool.fd


def test_the_buffer_is_the_whole_pool_and_writable() -> None:
    with HostPool(LAYOUT) as pool:
        pool.buffer[-3:] = b"end"

        assert len(pool.buffer) == LAYOUT.total_bytes
        assert bytes(pool.buffer[-3:]) == b"end"


def test_a_second_mapping_reads_what_the_owner_writes() -> None:
    with HostPool(LAYOUT) as pool, mmap.mmap(fd_of(pool), 0, prot=mmap.PROT_READ) as peer:
        pool.buffer[:5] = b"hello"

        assert peer[:5] == b"hello"


def test_a_second_writable_mapping_is_refused() -> None:
    with HostPool(LAYOUT) as pool, pytest.raises(PermissionError):
        mmap.mmap(fd_of(pool), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_writing_and_resizing_through_the_descriptor_are_refused() -> None:
    with HostPool(LAYOUT) as pool:
        for change in (
            lambda: os.pwrite(fd_of(pool), b"x", 0),
            lambda: os.ftruncate(fd_of(pool), 0),
            lambda: os.ftruncate(fd_of(pool), LAYOUT.total_bytes + 4096),
        ):
            with pytest.raises(PermissionError):
                change()


def test_close_is_idempotent_and_closes_the_descriptor() -> None:
    pool = HostPool(LAYOUT)
    fd = fd_of(pool)
    pool.close()
    pool.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_views_stay_readable_after_close() -> None:
    pool = HostPool(LAYOUT)
    view = pool.buffer[:2]
    view[:] = b"ok"
    pool.close()

    assert bytes(view) == b"ok"


def test_a_pool_that_cannot_be_allocated_names_its_bytes() -> None:
    layout = PoolLayout([KvTensor(0, "k", 2**20, 2**20, "float32")], num_blocks=2**20, block_size=4)

    with pytest.raises(ConfigError, match=str(layout.total_bytes)):
        HostPool(layout)


def test_a_pool_shared_with_a_rank_is_writable_by_no_later_one() -> None:
    joined: list[HostPool] = []

    with HostPool(LAYOUT, share=lambda fd: joined.append(HostPool.join(LAYOUT, os.dup(fd)))) as pool, joined[0] as rank:
        rank.buffer[:3] = b"abc"
        pool.buffer[3:6] = b"def"

        assert bytes(pool.buffer[:6]) == bytes(rank.buffer[:6]) == b"abcdef"
        with pytest.raises(PermissionError):
            mmap.mmap(fd_of(rank), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_joining_a_pool_of_another_size_is_refused() -> None:
    other = PoolLayout(LAYOUT.tensors, num_blocks=100, block_size=4)

    with HostPool(LAYOUT) as pool, pytest.raises(ConfigError, match=f"{LAYOUT.total_bytes} .* {other.total_bytes}"):
        HostPool.join(other, os.dup(fd_of(pool)))


def test_a_pool_that_no_rank_joined_is_freed() -> None:
    pools: list[File] = []

    def refuse(fd: int) -> None:
        pools.append(file_of(fd))
        assert pools[0] in open_files()
        raise ConfigError("the rank is gone")

    with pytest.raises(ConfigError, match="the rank is gone"):
        HostPool(LAYOUT, share=refuse)
    assert pools[0] not in open_files()
