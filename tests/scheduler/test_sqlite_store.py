"""The store of responses as the event loop sees it: bounded waits, a bounded queue, and clear failures."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scheduler.responses_store import sqlite_store
from scheduler.responses_store.response_store import StoredResponse
from scheduler.responses_store.sqlite_rows import StoreLimits
from scheduler.responses_store.sqlite_store import SqliteStore
from wire.errors import ConfigError, DeadlineExceeded, Overloaded, Unavailable

pytestmark = pytest.mark.anyio

LIMITS = StoreLimits(max_responses=100, max_bytes=10**6, ttl_s=100.0)
GIVE_UP_S = 10.0


def begun(response_id: str) -> StoredResponse:
    """Return a response that has just begun."""
    return StoredResponse(response_id, "", False, b"{}", b"[]")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[SqliteStore]:
    """A store in this folder."""
    store = await SqliteStore.open(folder / "store", LIMITS)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def stuck(store: SqliteStore) -> AsyncIterator[threading.Event]:
    """The thread waits within, as on a disk that does not answer, until the event is set."""
    began, released = threading.Event(), threading.Event()

    def stay() -> None:
        began.set()
        released.wait(GIVE_UP_S)

    store._thread.post(stay)
    assert await asyncio.to_thread(began.wait, GIVE_UP_S)
    try:
        yield released
    finally:
        released.set()


async def test_ids_name_their_store_also_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        first = store.new_id()
    async with opened(tmp_path) as store:
        second, own = store.new_id(), store.is_foreign(first)
    (tmp_path / "store").unlink()
    async with opened(tmp_path) as store:
        foreign = store.is_foreign(first)
        unknown = [store.is_foreign(one) for one in ("", "resp_1", f"{first}0", f"{first[:-1]}/", "chatcmpl-1")]

    assert first != second
    assert (own, foreign, unknown) == (False, True, [False] * 5)


async def test_a_stuck_disk_ends_waits_and_calls_still_run(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.add(begun("r1"))
        async with stuck(store):
            store._thread._timeout_s = 0.05
            with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.05 s"):
                await store.find("r1", "")
            with pytest.raises(DeadlineExceeded):
                await store.finish("r1", b'{"done": true}')
            with pytest.raises(DeadlineExceeded):
                await store.add(begun("r2"))
            store._thread._timeout_s = GIVE_UP_S

        found = await store.find("r1", "")
        assert found is not None
        assert (found.done, found.response) == (True, b'{"done": true}')
        assert await store.find("r2", "") is None


async def test_an_abandoned_add_leaves_no_response(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        async with stuck(store):
            adding = asyncio.create_task(store.add(begun("r1")))
            await asyncio.sleep(0)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding

        assert await store.find("r1", "") is None


async def test_a_full_queue_refuses_new_calls_but_no_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "MAX_WAITING", 1)
    async with opened(tmp_path) as store:
        await store.add(begun("r1"))
        async with stuck(store):
            waiting = asyncio.create_task(store.find("r1", ""))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="too many requests wait for the store of responses"):
                await store.add(begun("r2"))
            ending = asyncio.create_task(store.finish("r1", b"[]"))
            await asyncio.sleep(0)

        assert await ending
        found = await waiting
        assert found is not None
        assert not found.done


async def test_a_failing_file_is_unavailable_until_it_works(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.add(begun("r1"))
        full = "PRAGMA max_page_count = 1"
        await store._call(lambda: store._opened._connection.execute(full).fetchone())
        with pytest.raises(Unavailable, match="the store of responses failed: database or disk is full"):
            await store.add(StoredResponse("r2", "", False, b"{}", b"x" * 10**5))
        await store._call(lambda: store._opened._connection.execute("PRAGMA max_page_count = 1000").fetchone())

        await store.add(StoredResponse("r2", "", False, b"{}", b"x" * 10**5))
        assert await store.find("r2", "") is not None


async def test_a_file_damaged_while_open_is_a_clear_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(20):
            await store.add(StoredResponse(f"r{number}", "", False, b"{}", b"x" * 10_000))
        await store._call(lambda: store._opened._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        path = tmp_path / "store"
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))
        await store._call(lambda: store._opened._connection.execute("PRAGMA shrink_memory").fetchone())

        with pytest.raises(Unavailable, match="the store of responses failed: database disk image is malformed"):
            await store.find("r3", "")


async def test_expired_responses_go_without_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "DROP_EVERY_S", 0.01)
    now_s, dropped = 1000.0, threading.Event()
    store = await SqliteStore.open(tmp_path / "store", LIMITS, lambda: now_s)
    await store.add(begun("r1"))
    await store.finish("r1", b"{}")
    drop = store._opened.drop_expired
    now_s = 1101.0

    def noted() -> None:
        drop()
        dropped.set()

    monkeypatch.setattr(store._opened, "drop_expired", noted)
    assert await asyncio.to_thread(dropped.wait, GIVE_UP_S)
    await store.close()
    with sqlite3.connect(tmp_path / "store") as connection:
        assert connection.execute("SELECT count(*) FROM response").fetchone() == (0,)
    connection.close()


async def test_a_refused_file_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await SqliteStore.open(tmp_path / "missing" / "store", LIMITS)

    assert "pdserve-responses" not in {thread.name for thread in threading.enumerate()}
