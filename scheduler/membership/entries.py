"""Match the entries of one table to those of the next. Pure: no I/O, no clock."""

from collections import Counter
from dataclasses import dataclass

from ranktable_tools.addresses import dial_host
from ranktable_tools.digest import entry_form
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.tables import GlobalTable
from ranktable_tools.tables import InstanceEntry as TableInstance
from ranktable_tools.worker_urls import listed_port, url_of
from scheduler.membership.compatibility import ExpectedInstance
from wire.types import Role

_MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class _Entry:
    """One instance of the table in use; `listed` is its port in the table.

    `has_node_port`: its port is from NODE_PORTS, which overrides the table.
    """

    expected: ExpectedInstance
    form: str
    listed: int | None
    port: int
    has_node_port: bool


@dataclass(frozen=True, slots=True)
class Followed:
    """The instances of one table, in its order, and a warning for each one left out."""

    expected: tuple[ExpectedInstance, ...]
    left_out: tuple[str, ...]


class Entries:
    """Owner of the entries of the table in use, and of the number and name of every earlier entry.

    An entry is identified by its role, host, devices and port. It keeps its number and name while it is in the table,
    and gets them back when it returns; no other entry gets them, whatever its position. So `decode-1` stays `decode-1`
    when the entry before it is removed.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        instances, members = plan.global_table.instances, plan.global_table.members
        combined = [member.role for member in members if member.role == "combined"]
        self._num_named = Counter([*(instance.role for instance in instances), *combined])
        self._num_instances = len(instances)
        self._known: dict[tuple[str, str, str], ExpectedInstance] = {}
        self._current: list[_Entry] = []
        by_index = {member.index: member for member in members}
        for one in plan.instance_addresses:
            expected = _expected_instance(by_index[one.index], one.port, one.index, one.name)
            has_node_port = plan.has_node_ports and one.server.url is None
            entry = _Entry(expected, entry_form(one.server), listed_port(one.server), one.port, has_node_port)
            self._current.append(entry)
            self._remember_entry(entry)

    @property
    def expected(self) -> tuple[ExpectedInstance, ...]:
        """The instances of the table in use, in its order."""
        return tuple(entry.expected for entry in self._current)

    def follow(self, table: GlobalTable) -> Followed:
        """Switch to the next table. An entry that was not in the previous one needs a `server_port` or is left out."""
        left, followed, left_out = list(self._current), [], []
        for instance in table.members:
            before = _take(left, instance)
            port = _port(before, instance)
            if port is None:
                left_out.append(
                    f"{instance.role} instance on {instance.server.server_ip} is left out: {instance.json_path} of the "
                    "global table has no server_port, and NODE_PORTS is for the instances at the start"
                )
            else:
                followed.append(self._entry(instance, port, before))
        self._current = followed
        self._forget_the_oldest()
        return Followed(self.expected, tuple(left_out))

    def _entry(self, instance: TableInstance, port: int, before: _Entry | None) -> _Entry:
        form, listed = entry_form(instance.server), listed_port(instance.server)
        if before is not None and before.port == port:
            return _Entry(before.expected, form, listed, port, before.has_node_port)
        made = _expected_instance(
            instance, port, self._num_instances, f"{instance.role}-{self._num_named[instance.role]}"
        )
        known = self._known.get(_key(made, form))
        if known is None:
            self._num_instances += 1
            self._num_named[instance.role] += 1
        entry = _Entry(known or made, form, listed, port, has_node_port=False)
        self._remember_entry(entry)
        return entry

    def _remember_entry(self, entry: _Entry) -> None:
        self._known[_key(entry.expected, entry.form)] = entry.expected

    def _forget_the_oldest(self) -> None:
        current = {entry.expected.index for entry in self._current}
        gone = [key for key, expected in self._known.items() if expected.index not in current]
        for key in gone[: max(0, len(self._known) - _MAX_KNOWN)]:
            del self._known[key]


def _take(left: list[_Entry], instance: TableInstance) -> _Entry | None:
    """Remove and return the matching entry of the previous table: by port if two have the same devices."""
    form, role = entry_form(instance.server), Role(instance.role)
    same = [entry for entry in left if entry.form == form and entry.expected.role is role]
    found = next((entry for entry in same if entry.listed == listed_port(instance.server)), None)
    found = found or next(iter(same), None)
    if found is not None:
        left.remove(found)
    return found


def _port(before: _Entry | None, instance: TableInstance) -> int | None:
    if before is None:
        return listed_port(instance.server)
    if before.has_node_port:
        return before.port
    return listed_port(instance.server) or before.port


def _expected_instance(instance: TableInstance, port: int, index: int, name: str) -> ExpectedInstance:
    server = instance.server
    url = server.url or url_of(dial_host(server.server_ip), port)
    address = url.partition("://")[2] if server.worker is None else url
    return ExpectedInstance(index, name, Role(instance.role), address, server.server_ip, server.device_ids)


def _key(expected: ExpectedInstance, form: str) -> tuple[str, str, str]:
    return expected.role.value, form, expected.address
