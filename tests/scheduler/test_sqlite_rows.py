"""Stored responses in their file: any history of them, and the files that are refused."""

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.responses_store.response_store import StoredResponse
from scheduler.responses_store.sqlite_rows import INTERRUPTED, SqliteRows, StoreLimits
from tests.examples import examples
from wire.errors import ConfigError, InvalidRequest, Overloaded

LIMITS = StoreLimits(max_responses=5, max_bytes=600, ttl_s=100.0)
OWNERS = ("", "key-a", "key-b")


def shown(status: str, num_bytes: int = 0) -> bytes:
    """Return a response's object, about this long."""
    return json.dumps({"status": status, "text": "x" * num_bytes}).encode()


def stored(response_id: str, owner: str = "", *, items: bytes = b"[]", background: bool = False) -> StoredResponse:
    """Return a response that has just begun."""
    return StoredResponse(response_id, owner, background, shown("in_progress"), items)


class Store(RuleBasedStateMachine):
    """The file beside a dictionary in the order of age. `reopen` is also what happens after a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now_s, self.num_made = 1000.0, 0
        self.rows = self.opened()
        self.known: dict[str, tuple[StoredResponse, float]] = {}

    def opened(self) -> SqliteRows:
        """Return the file, opened."""
        return SqliteRows(Path(self.folder.name) / "store", LIMITS, lambda: self.now_s, busy_s=0.1)

    def teardown(self) -> None:
        """After closing, only the file is left."""
        self.rows.close()
        assert os.listdir(self.folder.name) == ["store"]
        self.folder.cleanup()

    @rule(owner=st.sampled_from(OWNERS), num_bytes=st.sampled_from((2, 50, 200, 700)), background=st.booleans())
    def add(self, owner: str, num_bytes: int, background: bool) -> None:
        """A response begins; the oldest ones go, never those that are not done."""
        self.num_made += 1
        new = stored(f"r{self.num_made}", owner, items=b"x" * num_bytes, background=background)
        self.drop_expired()
        fits = self.make_room(1, num_bytes + len(new.response))
        if fits:
            self.rows.add(new)
            self.known[new.response_id] = new, self.now_s
        else:
            with pytest.raises(InvalidRequest if num_bytes > LIMITS.max_bytes else Overloaded):
                self.rows.add(new)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), num_bytes=st.sampled_from((0, 60, 600)), events=st.sampled_from((b"", b"event: x\n\n")))
    def finish(self, data: st.DataObject, num_bytes: int, events: bytes) -> None:
        """A response is done, once."""
        response_id = data.draw(st.sampled_from(sorted(self.known)))
        before, began_s = self.known[response_id]
        response = shown("completed", num_bytes)
        expected = not before.done
        if expected:
            growth = len(response) + len(events) - len(before.response)
            expected = self.make_room(0, growth)
            del self.known[response_id]
            if expected:
                after = dataclasses.replace(before, response=response, done=True, events=events)
                self.known[response_id] = after, began_s
        assert self.rows.finish(response_id, response, events) == expected

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def delete(self, data: st.DataObject, owner: str) -> None:
        """An owner deletes a response; other owners cannot."""
        response_id = data.draw(st.sampled_from([*sorted(self.known), "unknown"]))
        expected = self.seen(response_id, owner) is not None
        assert self.rows.delete(response_id, owner) == expected
        if expected:
            del self.known[response_id]

    @rule(seconds=st.sampled_from((1.0, 60.0, 101.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds

    @rule()
    def reopen(self) -> None:
        """What was not done has failed."""
        self.rows.close()
        left = [one for one, _ in self.known.values() if not one.done]
        self.rows = self.opened()
        assert self.rows.num_interrupted == len(left)
        for one, began_s in list(self.known.values()):
            if not one.done:
                failed = json.dumps(json.loads(one.response) | {"status": "failed", "error": INTERRUPTED}).encode()
                ended = dataclasses.replace(one, response=failed, done=True)
                self.known[one.response_id] = ended, began_s
        self.drop_expired()
        self.make_room(0, 0)

    @invariant()
    def shows_each_owner_his_own(self) -> None:
        """Everyone finds his responses and no others; the counts are those of the file."""
        for response_id in [*self.known, "unknown"]:
            for owner in OWNERS:
                assert self.rows.find(response_id, owner) == self.seen(response_id, owner)
        in_file = self.rows._connection.execute("SELECT id FROM response").fetchall()
        assert len(in_file) == self.rows.num_responses <= LIMITS.max_responses
        sizes = "SELECT coalesce(sum(length(response) + length(items) + length(events)), 0) FROM response"
        assert self.rows._connection.execute(sizes).fetchone() == (self.rows.num_bytes,)
        assert self.rows.num_bytes <= LIMITS.max_bytes

    def seen(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return what this owner should find."""
        one, began_s = self.known.get(response_id, (None, 0.0))
        expired = one is not None and one.done and began_s < self.now_s - LIMITS.ttl_s
        return None if one is None or expired or one.owner != owner else one

    def drop_expired(self) -> None:
        """Forget what has expired."""
        for response_id, (one, began_s) in list(self.known.items()):
            if one.done and began_s < self.now_s - LIMITS.ttl_s:
                del self.known[response_id]

    def make_room(self, num_responses: int, num_bytes: int) -> bool:
        """Forget the oldest that are done until these fit; False, and nothing forgotten, if they never do."""
        done = sorted((began_s, int(name[1:]), name) for name, (one, began_s) in self.known.items() if one.done)
        sizes = {name: len(one.response + one.items + one.events) for name, (one, _) in self.known.items()}
        names = [name for _, _, name in done]
        for count in range(len(names) + 1):
            rest = sizes.keys() - set(names[:count])
            total = sum(sizes[name] for name in rest) + num_bytes
            if len(rest) + num_responses <= LIMITS.max_responses and total <= LIMITS.max_bytes:
                for name in names[:count]:
                    del self.known[name]
                return True
        return False


TestStore = Store.TestCase
TestStore.settings = examples(40, steps=25)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[SqliteRows]:
    """An empty store."""
    opened = SqliteRows(tmp_path / "store", LIMITS, lambda: 1000.0, busy_s=0.1)
    yield opened
    opened.close()


def _other_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def _newer(path: Path) -> None:
    SqliteRows(path, LIMITS, lambda: 0.0, busy_s=0.1).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()


def _torn(path: Path) -> None:
    SqliteRows(path, LIMITS, lambda: 0.0, busy_s=0.1).close()
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda path: path.mkdir(), "cannot be written: Is a directory"),
        (lambda path: path.symlink_to("elsewhere"), "cannot be written: Too many levels of symbolic links"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.write_bytes(b"not a database" * 100), "is damaged, or not a store of responses"),
        (_torn, "is damaged, or not a store of responses"),
        (_other_program, "is the database of another program"),
        (_newer, "has format 2, but this pdserve uses 1"),
    ],
)
def test_a_file_that_is_no_store_is_refused_and_kept(
    tmp_path: Path, prepare: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "store"
    prepare(path)
    before = path.read_bytes() if path.is_file() else None

    with pytest.raises(ConfigError, match=text):
        SqliteRows(path, LIMITS, lambda: 0.0, busy_s=0.1)

    assert (path.read_bytes() if path.is_file() else None) == before
    assert [one.name for one in tmp_path.iterdir()] == ["store"]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        SqliteRows(tmp_path / "missing" / "store", LIMITS, lambda: 0.0, busy_s=0.1)


def test_only_one_process_uses_a_file(rows: SqliteRows, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in use by another process"):
        SqliteRows(tmp_path / "store", LIMITS, lambda: 0.0, busy_s=0.1)


def test_only_the_user_can_read_the_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(0o644)
    before_umask = os.umask(0)
    try:
        rows = SqliteRows(path, LIMITS, lambda: 0.0, busy_s=0.1)
        rows.add(stored("r1"))
    finally:
        os.umask(before_umask)

    assert {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {"store": 0o600, "store-wal": 0o600}

    rows.close()


def test_a_deleted_response_leaves_no_text(rows: SqliteRows, tmp_path: Path) -> None:
    rows.add(stored("r1", items=b"SECRET"))

    assert rows.delete("r1", "")

    rows.close()
    assert b"SECRET" not in (tmp_path / "store").read_bytes()


def test_a_full_disk_changes_nothing_and_passes(rows: SqliteRows) -> None:
    rows.add(stored("r1", items=b"x" * 100))
    (pages,) = rows._connection.execute("PRAGMA page_count").fetchone()
    rows._connection.execute(f"PRAGMA max_page_count = {pages}")
    large = stored("r2", items=b"y" * 10_000)
    rows._limits = StoreLimits(100, 10**6, 100.0)

    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        rows.add(large)

    before = rows.num_responses, rows.num_bytes
    assert rows._connection.execute("SELECT count(*), sum(num_bytes) FROM response").fetchone() == before
    assert rows.find("r1", "") == stored("r1", items=b"x" * 100)
    rows._connection.execute("PRAGMA max_page_count = 1000")
    rows.add(large)
    assert rows.find(large.response_id, "") == large


_KILLED = """
import sys, time
from pathlib import Path
from scheduler.responses_store.response_store import StoredResponse
from scheduler.responses_store.sqlite_rows import SqliteRows, StoreLimits

rows = SqliteRows(Path(sys.argv[1]), StoreLimits(5, 10000, 100.0), lambda: 1000.0, busy_s=1.0)
for name in ("queued", "in_progress", "completed"):
    rows.add(StoredResponse(name, "key", True, b'{"status": "%b"}' % name.encode(), b"[]"))
rows.finish("completed", b'{"status": "completed"}')
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_undone_has_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)

    rows = SqliteRows(tmp_path / "store", LIMITS, lambda: 1000.0, busy_s=1.0)

    found = {name: rows.find(name, "key") for name in ("queued", "in_progress", "completed")}
    rows.close()
    assert rows.num_interrupted == 2
    assert {name: one and one.done and json.loads(one.response) for name, one in found.items()} == {
        "queued": {"status": "failed", "error": INTERRUPTED},
        "in_progress": {"status": "failed", "error": INTERRUPTED},
        "completed": {"status": "completed"},
    }
