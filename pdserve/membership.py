"""Whether a process of `up` is still an entry of the ranktable it was started with, which may change meanwhile."""

from pdserve.process_plan import ProcessPlan
from ranktable_tools.addresses import canonical, dial_host
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import GLOBAL_VARIABLE
from ranktable_tools.table_file import read_global
from ranktable_tools.tables import GlobalTable, TableServer
from ranktable_tools.watched_table import WatchedTable
from ranktable_tools.worker_urls import url_place


class TableMembership:
    """Owns the tables read, one per path; an invalid file leaves the previous table in use."""

    def __init__(self) -> None:
        self._files: dict[str, WatchedTable[GlobalTable]] = {}

    def has(self, plan: ProcessPlan) -> bool:
        """Return whether the table has the process; true for a scheduler, and while no table can be read."""
        path = plan.env.get(GLOBAL_VARIABLE)
        if plan.role == "scheduler" or path is None:
            return True
        file = self._files.setdefault(path, WatchedTable(path, _read))
        file.poll()
        return file.table is None or any(_is_at(instance.server, plan.address) for instance in file.table.instances)


def _read(path: str) -> GlobalTable:
    """Read a table without enforcing its device rules: its processes enforce them."""
    try:
        return read_global(path)
    except RanktableError as error:
        if error.code != "device-twice":
            raise
        return read_global(path, share_devices=True)


def _is_at(server: TableServer, address: str) -> bool:
    host, port = url_place(address)
    return canonical(dial_host(server.server_ip)) == canonical(host) and server.server_port == port
