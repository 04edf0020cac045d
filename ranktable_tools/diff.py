"""Describe in sentences how two tables differ: members added, removed, moved or changed. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import canonical
from ranktable_tools.convert import instance_names
from ranktable_tools.tables import Table, TableDevice, TableInstance, TableServer

_Key = tuple[tuple[str, tuple[str, ...], str | None], ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One instance of one table, its name there, and its position among all instances."""

    name: str
    order: int
    instance: TableInstance

    @property
    def key(self) -> _Key:
        """The hosts and devices that identify an instance; if it lists no devices, the hosts and the URL."""
        servers = self.instance.servers
        return tuple((canonical(one.server_ip), one.device_ids, None if one.devices else one.url) for one in servers)

    @property
    def location(self) -> str:
        """The hosts and devices as text."""
        devices = ",".join(device.device_id for device in self.instance.devices)
        hosts = " and ".join(server.server_ip for server in self.instance.servers)
        urls = "".join(f", {server.url}" for server in self.instance.servers if server.url is not None)
        return f"{hosts}, device{'s' if ',' in devices else ''} {devices}{urls}" if devices else f"{hosts}{urls}"

    def __str__(self) -> str:
        return f"{self.name} ({self.location})"


def diff(old: Table, new: Table) -> list[str]:
    """Return a sentence for each significant difference; empty if both tables describe the same cluster."""
    return [*_scheduler_changes(old.schedulers, new.schedulers), *_instances(_entries(old), _entries(new))]


def _scheduler_changes(old: Sequence[TableServer], new: Sequence[TableServer]) -> Iterator[str]:
    before, after = [canonical(server.server_ip) for server in old], [canonical(server.server_ip) for server in new]
    if before == after:
        yield from (
            f"The scheduler on {b.server_ip} {_port_change(a, b)}."
            for a, b in zip(old, new, strict=True)
            if a.server_port != b.server_port
        )
    elif not before:
        yield f"The scheduler on {new[0].server_ip} is new."
    elif not after:
        yield f"The scheduler on {old[0].server_ip} is gone."
    else:
        yield f"The scheduler moves from {' and '.join(before)} to {' and '.join(after)}."


def _instances(old: Sequence[_Entry], new: Sequence[_Entry]) -> Iterator[str]:
    pairs, gone, came = _pair_equal(old, new)
    moved, gone, came = _pair_moved(gone, came)
    for before, after in pairs:
        yield from _instance_changes(before, after)
    for before, after in moved:
        yield f"{before} moves to {after.location}."
    yield from (f"{entry} is gone." for entry in gone)
    yield from (f"{entry} is new." for entry in came)
    yield from _order(pairs)


def _pair_equal(
    old: Sequence[_Entry], new: Sequence[_Entry]
) -> tuple[list[tuple[_Entry, _Entry]], list[_Entry], list[_Entry]]:
    """Pair the instances with the same hosts and devices, preferring equal roles; return the unpaired ones too."""
    left, pairs, gone = list(new), [], []
    for entry in old:
        found = sorted(
            (other for other in left if other.key == entry.key),
            key=lambda other: other.instance.role != entry.instance.role,
        )
        if found:
            left.remove(found[0])
            pairs.append((entry, found[0]))
        else:
            gone.append(entry)
    return pairs, gone, left


def _pair_moved(
    gone: Sequence[_Entry], came: Sequence[_Entry]
) -> tuple[list[tuple[_Entry, _Entry]], list[_Entry], list[_Entry]]:
    """Pair the remaining instances by role and number: the same instance on other hosts or devices."""
    left = {entry.name: entry for entry in came}
    moved = [(entry, left.pop(entry.name)) for entry in gone if entry.name in left]
    taken = {before.name for before, _ in moved}
    return moved, [entry for entry in gone if entry.name not in taken], list(left.values())


def _instance_changes(before: _Entry, after: _Entry) -> Iterator[str]:
    if before.instance.role != after.instance.role:
        yield f"{before} becomes {after.name}."
    for old, new in zip(before.instance.servers, after.instance.servers, strict=True):
        if old.server_port != new.server_port:
            yield f"{after} {_port_change(old, new)}."
        if old.worker != new.worker:
            yield f"{after.name} is now {_engine(new)}; it was {_engine(old)}."
        if old.url != new.url:
            yield f"{after.name} changes its url from {old.url or 'none'} to {new.url or 'none'}."
        for a, b in zip(old.devices, new.devices, strict=True):
            device = f"{after.name}: device {a.device_id} on {new.server_ip}"
            yield from (f"{device} {change}." for change in _device_changes(a, b))


def _device_changes(old: TableDevice, new: TableDevice) -> Iterator[str]:
    for name, a, b in (
        ("device_ip", old.device_ip, new.device_ip),
        ("rank_id", old.rank_id, new.rank_id),
        ("device_port", old.device_port, new.device_port),
        ("super_device_id", old.super_device_id, new.super_device_id),
    ):
        if a != b:
            yield f"changes its {name} from {a or 'none'} to {b or 'none'}"


def _order(pairs: Sequence[tuple[_Entry, _Entry]]) -> Iterator[str]:
    """Report a changed order of the instances: NODE_PORTS follows the table's order."""
    kept = [after.order for before, after in pairs if before.instance.role == after.instance.role]
    if kept != sorted(kept):
        yield "The order of the instances changes, so the order of NODE_PORTS has to change too."


def _entries(table: Table) -> list[_Entry]:
    named = zip(instance_names(table.instances), table.instances, strict=True)
    return [_Entry(name, order, instance) for order, (name, instance) in enumerate(named)]


def _engine(server: TableServer) -> str:
    return "pdserve's own" if server.worker is None else f"a worker of {server.worker}"


def _port_change(old: TableServer, new: TableServer) -> str:
    if old.server_port is None:
        return f"now listens on port {new.server_port}"
    if new.server_port is None:
        return f"no longer has its port {old.server_port} in the table"
    return f"changes its port from {old.server_port} to {new.server_port}"
