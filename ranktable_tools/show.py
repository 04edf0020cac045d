"""Tell in a few lines what a table says and who talks to whom."""

from collections.abc import Sequence

from ranktable_tools.digest import table_digest
from ranktable_tools.tables import LocalTable, Server, TablePart, whole


def show_part(path: str, part: TablePart) -> list[str]:
    """Describe a global table, whole or not."""
    table = whole(part)
    state = f"digest {table_digest(table)}" if table else "one host's part, to be merged"
    lines = [f"{path}: {len(part.prefill)} prefill, {len(part.decode)} decode, {state}"]
    if part.scheduler is not None:
        lines.append(f"  scheduler  {part.scheduler.server_ip}")
    for instance in part.instances:
        lines.append(f"  {instance.role:<7} {instance.number:>2}  {_server(instance.server)}")
    if table is not None:
        lines.append(
            "clients -> scheduler -> every instance; KV goes from "
            f"{_names('prefill', part.prefill)} to {_names('decode', part.decode)}"
        )
    return lines


def show_local(path: str, table: LocalTable) -> list[str]:
    """Describe a local table."""
    kind = "an instance" if table.server.devices else "the scheduler"
    return [f"{path}: local table of {kind}", f"  {_server(table.server)}"]


def _server(server: Server) -> str:
    devices = f"  devices {','.join(server.device_ids)}" if server.devices else ""
    port = f"  port {server.server_port}" if server.server_port is not None else ""
    return f"{server.server_ip}{devices}{port}"


def _names(role: str, servers: Sequence[Server]) -> str:
    return f"{role} 0" if len(servers) == 1 else f"{role} 0-{len(servers) - 1}"
