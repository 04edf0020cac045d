"""Follow changes of the global table: dial new instances, drain removed ones, ignore invalid tables."""

import asyncio

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.diff import diff
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.table_file import read_global
from ranktable_tools.table_poller import TablePoller
from ranktable_tools.tables import GlobalTable
from ranktable_tools.watched_table import WatchedTable
from scheduler.membership.entries import Entries
from scheduler.registry import Registry
from scheduler.table_agreement import TableAgreement
from telemetry.logs import EventLogger

_log = EventLogger("table")

POLL_S = 1.0


class TableWatch:
    """Owner of the table in use by one scheduler; `plan` has the first one."""

    def __init__(self, plan: LaunchPlan, registry: Registry, *, poll_s: float = POLL_S) -> None:
        self._plan = plan
        self._registry = registry
        self._poll_s = poll_s
        self._table = plan.global_table
        self._entries = Entries(plan)
        self._agreement = TableAgreement()
        self._troubled = False

    async def run(self) -> None:
        """Check the file until cancelled."""
        poller = TablePoller(WatchedTable(self._plan.global_path, self._read, self._table))
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                self.take(await poller.poll())
                now = asyncio.get_running_loop().time()
                self._agreement.compare(self._registry.living(), self._registry.table.digest, now)
            except Exception as error:  # noqa: BLE001 - the outermost frame: keep the table and check later
                _log.error("table_watch_failed", error)

    def take(self, found: GlobalTable | RanktableError | None) -> None:
        """Use a new table, or log why it cannot be used."""
        if isinstance(found, RanktableError):
            self._pass_over(found)
        elif found is not None:
            self._follow_table(found)

    def _follow_table(self, table: GlobalTable) -> None:
        sentences = diff(self._table.table, table.table)
        self._table = table
        troubled, self._troubled = self._troubled, False
        if not sentences:
            if troubled:
                used = self._registry.table
                _log.info("table_valid_again", version=used.version, digest=used.digest)
            return
        followed = self._entries.follow(table)
        self._registry.change(followed.expected, table_digest(table), " ".join(sentences))
        for why in followed.left_out:
            _log.warning("instance_left_out", reason=why)

    def _pass_over(self, error: RanktableError) -> None:
        self._troubled = True
        used = self._registry.table
        if error.code == "not-completed":
            _log.info("table_not_ready", error=error, version=used.version, digest=used.digest)
        else:
            _log.warning("table_ignored", error=error, version=used.version, digest=used.digest)

    def _read(self, path: str) -> GlobalTable:
        """Read a table, on a thread. Raises RanktableError, also for a table of another scheduler."""
        table = read_global(path, share_devices=self._plan.share_devices)
        ours, theirs = self._plan.own.server_ip, table.scheduler.server_ip
        if canonical(ours) != canonical(theirs) and not HostComparer().same(ours, theirs):
            raise RanktableError(
                f"{path}: server_group_list[0].server_list[0].server_ip is {theirs}, but this scheduler is {ours}; "
                "to move the scheduler, stop this one and start the other"
            )
        return table
