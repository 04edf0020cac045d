"""A machine and tables for the doctor's checks: files below a folder, stub tools, tables as plain data."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ranktable_tools.doctor.case import DoctorInput, DoctorTables
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.tables import GlobalTable, LocalTable, TableDevice, TableServer
from tests.ranktable_tools.stub_tools import calls, write_stub

HERE = "127.0.0.1"
ELSEWHERE = "127.0.0.2"
"""Loopback, so that it can be reached, and none of this machine's own names, so that it counts as another host."""


class Bench:
    """One machine below `folder`; `nodes` are its device nodes."""

    def __init__(self, folder: Path, *nodes: str) -> None:
        self.root, self.tools = folder / "root", folder / "tools"
        self.tools.mkdir(parents=True)
        self.file("/dev/null", "")
        for node in nodes:
            self.file(f"/dev/{node}", "")

    def file(self, path: str, text: str) -> Path:
        """Write a file of the machine."""
        where = self.root / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        return where

    def tool(self, name: str, answers: Mapping[str, str], other: str = "") -> None:
        """Install a tool that answers these command lines."""
        write_stub(self.tools, name, answers, other=other)

    @property
    def calls(self) -> list[str]:
        """The command lines that its tools were called with."""
        return calls(self.tools)

    def machine(self, environ: Mapping[str, str] | None = None, *, cores: int = 2) -> Machine:
        """Return the machine, its tools alone on PATH."""
        return Machine({"PATH": str(self.tools), **(environ or {})}, root=self.root, cores=tuple(range(cores)))

    def case(
        self,
        tables: DoctorTables | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        cores: int = 2,
        url: str | None = None,
    ) -> DoctorInput:
        """Return a case whose waits are short."""
        return DoctorInput(
            self.machine(environ, cores=cores), tables or DoctorTables(), url, connect_s=2.0, command_s=20.0
        )


def server(host: str, ids: str = "", port: int | None = None, network: str = "10.20.0") -> TableServer:
    """Return an entry; the device addresses are `network` and the device id."""
    listed = ids.split(",") if ids else []
    devices = tuple(TableDevice(one, f"{network}.{one}", str(rank)) for rank, one in enumerate(listed))
    return TableServer(host, host, devices, port)


def tables(
    prefill: Sequence[TableServer],
    decode: Sequence[TableServer],
    *,
    local: TableServer | None = None,
    scheduler: str = HERE,
) -> DoctorTables:
    """Return tables as they are after reading; `local` is one of the entries, or has no device: the scheduler."""
    table = GlobalTable(server(scheduler), tuple(prefill), tuple(decode))
    own = next((one for one in table.instances if one.server == local), None)
    return DoctorTables("global.json", "local.json", table, None if local is None else LocalTable(local), own)
