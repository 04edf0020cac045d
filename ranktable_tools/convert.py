"""Convert a table between dialects, and report what the target dialect cannot represent. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from ranktable_tools.dialects.dialect import Dialect, ReadOptions
from ranktable_tools.dialects.registry import DIALECTS
from ranktable_tools.document import Node
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import parse_json
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.tables import InstanceRole, Table, TableDevice, TableInstance, TableServer


@dataclass(frozen=True, slots=True)
class Conversion:
    """The requested conversion: target dialect, one instance only (`prefill-0`), its role, the scheduler's address."""

    to: Dialect
    instance: str | None = None
    role: InstanceRole | None = None
    api_server: str | None = None
    share_devices: bool = False


@dataclass(frozen=True, slots=True)
class Converted:
    """The file text, the table that it contains, and a note for each kind of fact that was lost."""

    text: str
    table: Table
    notes: tuple[str, ...]


def convert(table: Table, wanted: Conversion) -> Converted:
    """Return the table in the target dialect. Raises RanktableError if that dialect cannot represent it."""
    if wanted.to.write is None:
        known = ", ".join(dialect.name for dialect in DIALECTS if dialect.write is not None)
        raise RanktableError(f"--to {wanted.to.name}: {wanted.to.name} can only be read; write one of {known}")
    table = _choose_instance(table, wanted)
    text = wanted.to.write(table)
    root = Node(parse_json(text, wanted.to.name), "", [])
    reading = wanted.to.read(root, ReadOptions())
    problems = [*root.problems, *errors(reading, RuleOptions(wanted.share_devices), root.problems)]
    if problems:
        raise RanktableError(f"as {wanted.to.name} the table would be invalid: {problems[0]}")
    return Converted(text, reading.table, tuple(_left_out(table, reading.table, wanted.to.name)))


def instance_names(instances: Sequence[TableInstance]) -> list[str]:
    """Return the names of instances: `prefill-0`, `decode-1`, and `instance-0` if the role is unknown."""
    seen: Counter[str] = Counter()
    names = []
    for instance in instances:
        role = instance.role or "instance"
        names.append(f"{role}-{seen[role]}")
        seen[role] += 1
    return names


def _choose_instance(table: Table, wanted: Conversion) -> Table:
    if wanted.instance is not None:
        names = instance_names(table.instances)
        if wanted.instance not in names:
            raise RanktableError(f"--instance {wanted.instance}: the table has {', '.join(names) or 'no instance'}")
        one = table.instances[names.index(wanted.instance)]
        table = Table("instance", (), (replace(one, role=None),))
    if wanted.role is not None:
        table = _with_role(table, wanted.role)
    if wanted.api_server is not None:
        if table.schedulers:
            listed = ", ".join(server.server_ip for server in table.schedulers)
            raise RanktableError(f"--api-server {wanted.api_server}: the table has a scheduler already: {listed}")
        table = replace(table, schedulers=(TableServer(wanted.api_server, wanted.api_server),))
    return table


def _with_role(table: Table, role: InstanceRole) -> Table:
    if table.kind != "instance" or len(table.instances) != 1:
        raise RanktableError(f"--role {role} is for a table of one instance, but this table has {len(table.instances)}")
    return Table("cluster", (), (replace(table.instances[0], role=role),))


def _left_out(before: Table, after: Table, dialect: str) -> Iterator[str]:
    """Yield a note for each kind of fact that was lost in the conversion, with its count."""
    lost = _count_keys(before)
    lost.subtract(_count_keys(after))
    for what, count in lost.items():
        if count > 0:
            yield f"{what} ({count}x) is left out: {dialect} has no place for it"


def _count_keys(table: Table) -> Counter[str]:
    servers = [*table.schedulers, *(server for instance in table.instances for server in instance.servers)]
    entries: list[TableServer | TableDevice] = [*servers, *(device for server in servers for device in server.devices)]
    found = Counter({"scheduler": len(table.schedulers)})
    found["role"] = sum(instance.role is not None for instance in table.instances)
    for entry in entries:
        names = [field.name for field in fields(entry) if field.name not in ("devices", "server_id", "server_ip")]
        found.update(name for name in names if getattr(entry, name) is not None)
    return found
