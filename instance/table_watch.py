"""Follow the global table of an instance: the addresses of its peers, and whether it lists the instance itself.

belongs --entry gone--> works until its session ends --too late--> refuses new prompts --idle or too late--> ends
   ^------------ entry listed again -----------------'----------------------------'
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.matching import find_own_entry
from ranktable_tools.peers import peer_addresses
from ranktable_tools.table_file import read_global
from ranktable_tools.table_poller import TablePoller
from ranktable_tools.tables import GlobalTable, LocalTable
from ranktable_tools.watched_table import WatchedTable
from security.trust import Trust
from telemetry.logs import EventLogger
from wire.errors import ConfigError

_log = EventLogger("table")

POLL_S = 1.0
LET_GO_S = 30.0
"""Time for the scheduler to read the same table and drain us; after that we refuse new prompts, or end if idle."""
DRAIN_S = 300.0


class Stage(Enum):
    """The stage of an instance's shutdown after its entry was removed from the table."""

    BELONGS = auto()
    WORKS_ON = auto()
    REFUSES = auto()
    ENDS = auto()


class WatchedInstance(Protocol):
    """The methods of an instance that the watch uses."""

    def use_table(self, digest: str) -> None:
        """Adopt the table with this digest."""
        ...

    @property
    def in_session(self) -> bool:
        """Whether a scheduler has an open session."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is on the instance."""
        ...

    def drain(self, why: str | None) -> None:
        """Refuse new prompts with this message; None accepts them again."""
        ...


@dataclass(frozen=True, slots=True)
class OwnTable:
    """A table, the addresses of its hosts, and why our entry is not in it (empty if the entry is there)."""

    table: GlobalTable
    hosts: frozenset[str]
    gone: str


def stage(gone_s: float | None, *, in_session: bool, is_busy: bool) -> Stage:
    """Return the stage `gone_s` seconds after the entry was removed (None: it is listed). Pure.

    The scheduler drains us by its own table and then ends the session; if it does not, its table is a different one.
    """
    if gone_s is None:
        return Stage.BELONGS
    if not in_session:
        return Stage.ENDS
    if gone_s < LET_GO_S:
        return Stage.WORKS_ON
    return Stage.REFUSES if is_busy and gone_s < LET_GO_S + DRAIN_S else Stage.ENDS


class EntryWatch:
    """Owner of the table state of an instance. `hold` locks the entry under a new table's digest, so that no second
    process starts for it; `plan` is what the tables contained at start-up.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        host: WatchedInstance,
        trust: Trust,
        hold: Callable[[str], None],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._plan, self._host, self._trust, self._hold = plan, host, trust, hold
        self._poll_s = poll_s
        self._digest = plan.table_digest
        self._hosts = frozenset[str]()
        self._changed_at: float | None = None
        self._gone_at: float | None = None
        self._gone = ""
        self._troubled = False
        self._stage = Stage.BELONGS

    async def run(self) -> str:
        """Follow the table until this instance has to end; return the reason, for the log."""
        poller = TablePoller(WatchedTable(self._plan.global_path, self.read))
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.take(await poller.poll(), loop.time())
                if self.advance(loop.time()) is Stage.ENDS:
                    return self._gone
            except Exception as error:  # noqa: BLE001 - the outermost frame: keep the state, look again
                _log.error("table_watch_failed", error)
            await asyncio.sleep(self._poll_s)

    def read(self, path: str) -> OwnTable:
        """Read the table, in a worker thread. Raises RanktableError."""
        table = read_global(path, share_devices=self._plan.share_devices)
        return OwnTable(table, peer_addresses(table), self._why_gone(table))

    def take(self, found: OwnTable | RanktableError | None, now: float) -> None:
        """Adopt a table that was read, or log why it is ignored."""
        if isinstance(found, RanktableError):
            self._troubled = True
            waits = found.code == "not-completed"
            (_log.info if waits else _log.warning)("table_not_ready" if waits else "table_ignored", error=found)
        elif found is not None:
            self._follow_table(found, now)

    def advance(self, now: float) -> Stage:
        """Apply what is due at `now`, and return the stage of the instance."""
        if self._changed_at is not None and now - self._changed_at > LET_GO_S + DRAIN_S:
            self._changed_at = None
            self._trust.follow(self._hosts)
        gone_s = None if self._gone_at is None else now - self._gone_at
        after = stage(gone_s, in_session=self._host.in_session, is_busy=self._host.is_busy)
        if after is not self._stage:
            self._enter_stage(after)
        return after

    def _follow_table(self, found: OwnTable, now: float) -> None:
        digest = table_digest(found.table)
        if digest != self._digest:
            _log.info("table_changed", digest=digest)
        elif self._troubled:
            _log.info("table_valid_again", digest=digest)
        self._troubled = False
        if (digest, found.hosts, found.gone) == (self._digest, self._hosts, self._gone):
            return  # readable again and unchanged: removed hosts keep their deadline
        self._digest = digest
        self._host.use_table(digest)
        self._trust.follow(found.hosts | self._hosts)  # removed hosts may still send or receive KV
        self._hosts, self._changed_at = found.hosts, now
        self._gone = found.gone
        if not found.gone:
            self._gone_at = None
            self._take_entry(digest)
        elif self._gone_at is None:
            self._gone_at = now

    def _take_entry(self, digest: str) -> None:
        try:
            self._hold(digest)
        except ConfigError as error:
            _log.warning("table_entry_in_use", error=error)

    def _enter_stage(self, after: Stage) -> None:
        before, self._stage = self._stage, after
        self._host.drain(self._gone if after in (Stage.REFUSES, Stage.ENDS) else None)
        match after:
            case Stage.BELONGS:
                _log.info("table_entry_restored", before=before.name.lower())
            case Stage.WORKS_ON:
                _log.warning(
                    "table_entry_removed", reason=self._gone, next="ends when its scheduler closes the session"
                )
            case Stage.REFUSES:
                text = "new prompts are refused; the instance ends when the running ones have finished"
                _log.warning("session_not_closed_by_scheduler", waited_s=LET_GO_S, next=text)
            case Stage.ENDS:
                _log.warning("instance_stopping", reason=self._gone, busy=self._host.is_busy)

    def _why_gone(self, table: GlobalTable) -> str:
        own = self._plan.own
        name = f"{self._plan.name} ({own.server_ip}, devices {','.join(own.device_ids)})"
        text = f"{name} is gone from the global table {self._plan.global_path}"
        try:
            entry = find_own_entry(LocalTable(own), table)
        except RanktableError:
            return text
        there = None if entry is None else entry.server.server_port
        if self._plan.has_node_ports or there is None or own.server_port in (None, there):
            return ""
        return f"{text}: the entry with its devices has port {there}, but this process has {own.server_port}"
