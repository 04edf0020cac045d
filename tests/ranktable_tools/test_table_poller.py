"""Reading a table beside an event loop."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.table_poller import TablePoller
from ranktable_tools.watched_table import WatchedTable


def _length(path: str) -> int:
    return len(Path(path).read_text())


def test_a_read_returns_the_files_content(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text("abc")

    async def looks() -> list[object]:
        poller = TablePoller(WatchedTable(str(file), _length))
        return [await poller.poll(), await poller.poll()]

    assert asyncio.run(looks()) == [3, None]


def test_a_hung_file_is_reported_once_and_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "t"
    os.mkfifo(pipe)  # an open for reading hangs until somebody writes

    async def looks() -> list[object]:
        poller = TablePoller(WatchedTable(str(pipe), lambda path: 7), timeout_s=0.05)
        reported = [await poller.poll(), await poller.poll()]
        await asyncio.to_thread(pipe.write_text, "x")
        async with asyncio.timeout(300):
            while (found := await poller.poll()) is None:
                pass
        return [*reported, found]

    slow, again, found = asyncio.run(looks())

    assert isinstance(slow, RanktableError)
    assert "no response from its file system for 0.05 s" in str(slow)
    assert (again, found) == (None, 7)


def test_an_unchanged_table_is_reported_after_a_hang(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text("abc")
    opened = threading.Event()

    def slowly(path: str) -> int:
        assert opened.wait(300)
        return 3

    async def looks() -> list[object]:
        poller = TablePoller(WatchedTable(str(file), slowly, 3), timeout_s=0.05)
        reported = await poller.poll()
        opened.set()
        poller._timeout_s = 30.0  # from here on only a slow machine delays a read
        async with asyncio.timeout(300):
            while (found := await poller.poll()) is None:
                pass
        return [reported, found, await poller.poll()]

    slow, found, later = asyncio.run(looks())

    assert isinstance(slow, RanktableError)
    assert (found, later) == (3, None)


def test_an_exception_of_the_reader_reaches_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text("abc")

    def broken(path: str) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(TablePoller(WatchedTable(str(file), broken)).poll())
