"""Who sits where: the global table that follows the instances from node to node."""

from collections.abc import Sequence
from pathlib import Path

from ranktable_tools.dialects.modelarts import global_text
from ranktable_tools.digest import table_digest
from ranktable_tools.file_names import HOST, global_name, local_name
from ranktable_tools.table_file import write_global, write_local
from ranktable_tools.tables import GlobalTable, LocalTable, TableServer
from wire.errors import ConfigError


class Placements:
    """Owns the seats and the table's file, which is replaced whole, by a rename, whenever an instance sits elsewhere.

    An instance that was lost keeps its entry, so that the others keep theirs, until it sits again or another takes one
    of its devices or its port. There is no table before all have sat, and none while a role has no entry: then the file
    stays as it is.
    """

    def __init__(self, names: Sequence[str], scheduler_ip: str, folder: Path) -> None:
        self._names = tuple(names)
        self._scheduler = TableServer(scheduler_ip, scheduler_ip)
        self._folder = folder
        self._seats: dict[str, TableServer] = {}
        self._lost: set[str] = set()
        self._written: GlobalTable | None = None

    @property
    def path(self) -> Path:
        """Where the global table is."""
        return self._folder / global_name(self._scheduler.server_ip)

    @property
    def scheduler_path(self) -> Path:
        """Where the scheduler's local table is."""
        return self._folder / local_name(self._scheduler.server_ip, HOST)

    def sit(self, name: str, server: TableServer) -> None:
        """Give an instance its entry. Raises ConfigError where another that is there has a device or the port of it."""
        for other, theirs in list(self._seats.items()):
            clash = None if other == name else _clash(server, theirs)
            if clash is not None and other not in self._lost:
                raise ConfigError(f"{name} was given {clash} of {server.server_ip}, which {other} has")
            if clash is not None:
                del self._seats[other]
        self._seats[name] = server
        self._lost.discard(name)

    def lose(self, name: str) -> None:
        """Note that an instance is there no more."""
        self._lost.add(name)

    def table(self) -> GlobalTable | None:
        """Return the table as it is now, None where there is none."""
        if self._written is None and len(self._seats) < len(self._names):
            return None
        prefill, decode = (
            tuple(self._seats[name] for name in self._names if name in self._seats and name.startswith(role))
            for role in ("prefill-", "decode-")
        )
        return GlobalTable(self._scheduler, prefill, decode) if prefill and decode else None

    @property
    def text(self) -> str:
        """The text of the table that was written last; empty before."""
        return "" if self._written is None else global_text(self._written)

    def write(self) -> str | None:
        """Write the table where it is another than the last one; return its digest then. Raises RanktableError."""
        table = self.table()
        if table is None or table == self._written:
            return None
        if self._written is None:
            write_local(self.scheduler_path, LocalTable(self._scheduler))
        write_global(self.path, table)
        self._written = table
        return table_digest(table)


def _clash(one: TableServer, other: TableServer) -> str | None:
    if one.server_ip != other.server_ip:
        return None
    shared = sorted(set(one.device_ids) & set(other.device_ids))
    if shared:
        return f"device {shared[0]}"
    return f"port {one.server_port}" if one.server_port == other.server_port else None
