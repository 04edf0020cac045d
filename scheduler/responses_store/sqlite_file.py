"""Open the sqlite file of stored responses: private to its user, and used by one process at a time."""

import os
import sqlite3
import stat
from pathlib import Path

from scheduler.responses_store.response_ids import new_store_id
from wire.errors import ConfigError

_APPLICATION_ID = 0x70647273
_VERSION = 1
_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SCHEMA = (
    "CREATE TABLE store (id TEXT NOT NULL)",
    "CREATE TABLE response (id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL,"
    " background INTEGER NOT NULL, done INTEGER NOT NULL, num_bytes INTEGER NOT NULL,"
    " response BLOB NOT NULL, items BLOB NOT NULL, events BLOB NOT NULL)",
    "CREATE INDEX by_age ON response (done, created_s)",
)


def open_file(path: Path, *, busy_s: float) -> tuple[sqlite3.Connection, str]:
    """Return a connection in autocommit mode, and the store's id. A missing file is created.

    Waits up to `busy_s` for another process to end. Raises ConfigError with the reason and the path.
    """
    _make_private(path)
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None)
    try:
        return connection, _prepare(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise ConfigError(f"--responses-store {path} is in use by another process") from error
        raise ConfigError(f"--responses-store {path} cannot be used: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(
            f"--responses-store {path} is damaged, or not a store of responses: {error}; remove it to start anew"
        ) from error
    except BaseException:
        connection.close()
        raise


def _make_private(path: Path) -> None:
    try:
        descriptor = os.open(path, _FLAGS, _MODE)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"--responses-store {path} is not a regular file")
            os.fchmod(descriptor, _MODE)  # sqlite gives its own files next to it the same mode
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"--responses-store {path} cannot be written: {error.strerror}") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> str:
    """Lock the file; check its schema, or write the schema into an empty file; return the store's id."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN IMMEDIATE")
    (application,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO store VALUES (?)", (new_store_id(),))
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    elif application != _APPLICATION_ID:
        raise ConfigError(f"--responses-store {path} is the database of another program")
    elif version != _VERSION:
        raise ConfigError(
            f"--responses-store {path} has format {version}, but this pdserve uses {_VERSION}: use another file"
        )
    (store_id,) = connection.execute("SELECT id FROM store").fetchone()
    connection.execute("COMMIT")
    connection.execute("PRAGMA secure_delete = ON")  # deleted text is overwritten
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # what is committed survives a crash of the process
    return str(store_id)
