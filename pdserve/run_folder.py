"""The run folder of `pdserve up` or `pdserve route`: lock, cluster state, tables and logs.

<run folder>/lock  state.json  tables/  logs/NAME.log
"""

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from pdserve.replacement import Phase
from wire.errors import ConfigError

_BESIDE = ("supervisor", "spare")
_ADVICE = "choose another one with --run-dir or PDSERVE_RUN_DIR"
_OWN = frozenset(("lock", "logs", "state.json", "state.new", "tables", "route"))


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """Return $PDSERVE_RUN_DIR, else pdserve's folder in XDG's state folder."""
    return _folder(environ, "PDSERVE_RUN_DIR", "XDG_STATE_HOME", ".local/state")


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return $PDSERVE_CACHE_DIR, else pdserve's folder in XDG's cache folder."""
    return _folder(environ, "PDSERVE_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a cluster. `started` distinguishes it from a later one with the same pid.

    `restarts` counts its starts after the first; `note` says briefly what happens after its death. `phases` are
    the completed ones of its last replacement, which ended at `replaced_at`, in seconds since
    1970. A process on another machine has the pid 0, which no process has.
    """

    name: str
    role: str
    pid: int
    started: int
    address: str
    log: str
    restarts: int = 0
    note: str = ""
    phases: tuple[Phase, ...] = ()
    from_spare: bool = False
    replaced_at: float | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine: only those can be inspected or signalled."""
        return self.pid > 0

    @property
    def alive(self) -> bool:
        """Whether this very process still runs here."""
        return start_time(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state that `pdserve up` writes: the cluster's URL, its processes, and the supervisor that watches them.

    `is_starting`: it has not been ready yet.
    """

    base_url: str
    model: str
    processes: tuple[ProcessRecord, ...]
    supervisor: ProcessRecord | None = None
    is_starting: bool = False
    spare: ProcessRecord | None = None

    @property
    def is_up(self) -> bool:
        """Whether anything of it still runs."""
        return bool(self.living()) or (self.supervisor is not None and self.supervisor.alive)

    def living(self) -> tuple[ProcessRecord, ...]:
        """Return the processes that still run."""
        return tuple(process for process in self.processes if process.alive)


def start_time(pid: int) -> int | None:
    """Return a process's start time, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may have any name
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


class RunFolder:
    """One run folder, used by at most one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables = path / "tables"
        self.state, self._draft = path / "state.json", path / "state.new"

    def log(self, name: str) -> Path:
        """Return the log path of the process `name`."""
        return self.path / "logs" / f"{name}.log"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder.

        Raises ConfigError if another pdserve holds it, it cannot be created, or it has tables that pdserve did not
        write.
        """
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another pdserve holds the run folder {self.path}") from None
            yield

    def _lock_file(self) -> TextIO:
        lock = self.path / "lock"  # never deleted: it shows that the tables are ours to replace
        if self.tables.exists() and not lock.exists():
            raise ConfigError(f"the run folder {self.path} has tables that pdserve did not write there: {_ADVICE}")
        try:
            self._make()
            return open(lock, "w", opener=_open_private)
        except OSError as error:
            raise self._cannot_be_used(error) from error

    def _make(self) -> None:
        """Create the folder for its owner alone; restrict an existing one that has only pdserve's files."""
        for folder in (self.path, self.log("any").parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {one.name for one in self.path.iterdir()} <= _OWN:
            with suppress(PermissionError):  # it is another user's
                self.path.chmod(0o700)

    def _cannot_be_used(self, error: OSError) -> ConfigError:
        return ConfigError(f"the run folder {self.path} cannot be used: {error.strerror}: {_ADVICE}")

    def read(self) -> ClusterState | None:
        """Return the cluster's state, or None when there is none. Raises ConfigError for an unreadable one."""
        try:
            data = json.loads(self.state.read_text())
            processes = tuple(map(_parse_record, data.pop("processes")))
            watcher, spare = (
                None if one is None else _parse_record(one) for one in map(data.pop, _BESIDE, (None, None))
            )
            return ClusterState(processes=processes, supervisor=watcher, spare=spare, **data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._cannot_be_used(error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self.state} was not written by pdserve: {error}; delete it") from error

    def write(self, state: ClusterState) -> None:
        """Replace the cluster's state atomically; the caller holds the lock. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._draft, "w", opener=_open_private) as draft:
            draft.write(json.dumps(dataclasses.asdict(state), indent=2) + "\n")
            draft.flush()
            os.fsync(draft.fileno())  # else a crash of the machine may leave the file without content
        self._draft.replace(self.state)

    def clear(self) -> None:
        """Delete the cluster's state and tables, not its logs; the caller holds the lock."""
        for file in (self.state, self._draft):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.tables, ignore_errors=True)

    def clear_unless_held(self) -> None:
        """Delete the state of an ended cluster, unless a `pdserve up` holds the lock: the state is then its own."""
        with suppress(FileNotFoundError, BlockingIOError), (self.path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.clear()

    def rename_old_logs(self) -> None:
        """Rename the last run's logs to NAME.log.1, also those of processes that the next run lacks."""
        for log in list(self.log("any").parent.glob("*.log")):
            log.replace(log.with_name(log.name + ".1"))


def _parse_record(data: dict[str, Any]) -> ProcessRecord:
    return ProcessRecord(**{**data, "phases": tuple(Phase(*one) for one in data.get("phases", ()))})


def open_log(log: Path, *, anew: bool = False) -> BinaryIO:
    """Open a log for appending; file and folder are accessible to their owner alone. Raises OSError.

    With `anew`, the last run's log is kept beside it, since users often need that one.
    """
    if anew and log.exists():
        log.replace(log.with_name(log.name + ".1"))
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(log, "ab", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def last_line(log: Path) -> str:
    """Return the last non-blank line of a log, or a note for an empty one."""
    return last_lines(log, 1)[0].strip()


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` non-blank lines of a log, or a one-line note for an empty one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return ["(no log)"]
    return lines[-count:] or ["(its log is empty)"]


def _folder(environ: Mapping[str, str], own: str, xdg: str, home: str) -> Path:
    if environ.get(own):
        return Path(environ[own]).absolute()
    if environ.get(xdg):
        return Path(environ[xdg]).absolute() / "pdserve"
    return Path(environ.get("HOME") or Path.home()) / home / "pdserve"
