"""Generate the tables of one host. Pure: from arguments and device addresses to tables and file names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import host_problem, scope_problem
from ranktable_tools.errors import RanktableError
from ranktable_tools.file_names import HOST, global_name, local_name
from ranktable_tools.ports import counted_ports, parse_port
from ranktable_tools.tables import LocalTable, TableDevice, TablePart, TableServer, WorkerKind

_MAX_DIGITS = 9
_DEVICE_ID = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class GenRequest:
    """What to generate: the device ids of each instance, whether the scheduler is here, this host's address.

    `share_devices` allows two instances to use one GPU. `worker`: the instances are another engine's.
    """

    prefill: tuple[tuple[str, ...], ...]
    decode: tuple[tuple[str, ...], ...]
    with_scheduler: bool
    ip: str
    ports: tuple[int, ...] = ()
    share_devices: bool = False
    worker: WorkerKind | None = None

    @property
    def instances(self) -> tuple[tuple[str, ...], ...]:
        """The device ids of each instance, prefill first."""
        return (*self.prefill, *self.decode)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """All device ids, prefill first."""
        return tuple(device_id for ids in self.instances for device_id in ids)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The name of each instance's local table; with the port only if two instances have the same devices."""
        ports = self.ports or (None,) * len(self.instances)
        return tuple(
            local_name(self.ip, ids, port if self.share_devices and self.instances.count(ids) > 1 else None)
            for ids, port in zip(self.instances, ports, strict=True)
        )


@dataclass(frozen=True, slots=True)
class NamedLocal:
    """A local table and the name of its file."""

    file_name: str
    table: LocalTable


@dataclass(frozen=True, slots=True)
class Generated:
    """The tables of one host and their file names; local tables in global order, the scheduler's last."""

    global_name: str
    part: TablePart
    instances: tuple[NamedLocal, ...]
    host: NamedLocal | None

    @property
    def locals(self) -> tuple[NamedLocal, ...]:
        """All local tables."""
        return self.instances if self.host is None else (*self.instances, self.host)


def parse_device_lists(flag: str, values: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Parse `4,5 6,7`: spaces separate instances, commas devices. Raises RanktableError naming flag and value."""
    blank = next((value for value in values if not value.strip()), None)
    if blank is not None:
        raise RanktableError(
            f"Input format error. {flag} has {blank!r}, an empty list; write device ids like 4,5 6,7, or omit the flag"
        )
    words = [word for value in values for word in value.split()]
    lists = tuple(tuple(word.split(",")) for word in words)
    for word, ids in zip(words, lists, strict=True):
        long = next((one for one in ids if len(one) > _MAX_DIGITS and _DEVICE_ID.fullmatch(one)), None)
        if long is not None:
            shown = f"{long[:24]}, a device id of {len(long)} digits"
            raise RanktableError(f"Input format error. {flag} has {shown}; the limit is {_MAX_DIGITS}")
        if not all(_DEVICE_ID.fullmatch(device_id) for device_id in ids):
            raise RanktableError(
                f"Input format error. {flag} has {word!r}; "
                "write device ids separated by commas and instances separated by spaces, like 4,5 6,7"
            )
    return tuple(tuple(str(int(device_id)) for device_id in ids) for ids in lists)


def parse_ports(value: str, num_instances: int) -> tuple[int, ...]:
    """Parse `8088,8089`, one port per instance, prefill first. Raises RanktableError naming --ports and the value."""
    parsed = [parse_port(word) for word in value.split(",")]
    ports = tuple(port for port in parsed if port is not None)
    if len(ports) < len(parsed):
        raise RanktableError(f"--ports is {value!r}; write ports from 1 to 65535 separated by commas, like 8088,8089")
    if len(ports) != num_instances:
        raise RanktableError(
            f"--ports has {counted_ports(len(ports))}, but the instances need {num_instances}: {value}"
        )
    twice = next((port for port in ports if ports.count(port) > 1), None)
    if twice is not None:
        raise RanktableError(f"--ports has {twice} twice: {value}; instances of one host need different ports")
    return ports


def check_request(request: GenRequest) -> None:
    """Reject an invalid request before a device is queried or a file is written."""
    if not request.device_ids and not request.with_scheduler:
        raise RanktableError("nothing to generate: set --prefill-server-list, --decode-server-list or --api-server")
    problem = host_problem(request.ip) or scope_problem(request.ip)
    if problem is not None:
        raise RanktableError(f"--ip is {request.ip!r}; {problem}")
    _check_devices_once(request)
    _check_names(request)


def build(request: GenRequest, device_ips: Mapping[str, str]) -> Generated:
    """Return the tables of a checked request; `device_ips` maps device ids to addresses."""
    ports: list[int | None] = list(request.ports) or [None] * len(request.instances)
    instances = [
        TableServer(request.ip, request.ip, _devices(ids, device_ips), port, request.worker)
        for ids, port in zip(request.instances, ports, strict=True)
    ]
    split = len(request.prefill)
    scheduler = TableServer(request.ip, request.ip) if request.with_scheduler else None
    return Generated(
        global_name=global_name(request.ip),
        part=TablePart(scheduler, tuple(instances[:split]), tuple(instances[split:])),
        instances=tuple(
            NamedLocal(name, LocalTable(server)) for name, server in zip(request.file_names, instances, strict=True)
        ),
        host=None if scheduler is None else NamedLocal(local_name(request.ip, HOST), LocalTable(scheduler)),
    )


def tensor_parallel_note(sizes: Sequence[int]) -> str | None:
    """Return a note if instances have different numbers of devices, which is allowed; `sizes` are prefill first."""
    if len(set(sizes)) < 2:
        return None
    listed = ",".join(str(size) for size in sizes)
    return f"the instances differ in tensor-parallel-size, prefill first: {listed}"


def _check_devices_once(request: GenRequest) -> None:
    owner_by_id: dict[str, str] = {}
    for label, ids in _labelled_instances(request):
        for device_id in ids:
            owner = owner_by_id.get(device_id)
            if owner is not None and (owner == label or not request.share_devices):
                places = f"twice in {label}"
                if owner != label:
                    remedy = "if it is a GPU, ranktable gen --share-devices assigns it to both"
                    places = f"in {owner} and in {label}; {remedy}"
                raise RanktableError(
                    "A device_id can be used only once in prefill server and decode server. "
                    f"Device {device_id} is {places}"
                )
            owner_by_id[device_id] = label


def _check_names(request: GenRequest) -> None:
    owner_by_name: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, (label, ids) in zip(request.file_names, _labelled_instances(request), strict=True):
        owner, its_ids = owner_by_name.setdefault(name, (label, ids))
        if owner == label:
            continue
        remedy = "group the devices differently, or generate each with its own --save-dir and merge"
        if ids == its_ids:
            remedy = "instances with the same devices are distinguished by their ports: set --ports"
        raise RanktableError(
            f"{name} would be the file of both {owner} ({','.join(its_ids)}) and {label}; nothing was written: {remedy}"
        )


def _labelled_instances(request: GenRequest) -> list[tuple[str, tuple[str, ...]]]:
    prefill = [(f"prefill-{number}", ids) for number, ids in enumerate(request.prefill)]
    return prefill + [(f"decode-{number}", ids) for number, ids in enumerate(request.decode)]


def _devices(ids: tuple[str, ...], device_ips: Mapping[str, str]) -> tuple[TableDevice, ...]:
    return tuple(TableDevice(device_id, device_ips[device_id], str(rank)) for rank, device_id in enumerate(ids))
