"""Run gen: query the devices, write the files, print what was saved. Both command lines call it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktable_tools.addresses import own_address
from ranktable_tools.devices.card_addresses import card_addresses, has_own_network
from ranktable_tools.devices.kinds import DeviceKind, absent_note, find_kind, may_share, present_devices
from ranktable_tools.devices.npu_addresses import AddressSource
from ranktable_tools.errors import RanktableError
from ranktable_tools.generate import (
    Generated,
    GenRequest,
    build,
    check_request,
    parse_device_lists,
    parse_ports,
    tensor_parallel_note,
)
from ranktable_tools.save_tables import make_directory
from ranktable_tools.table_file import read_local, write_global, write_local
from ranktable_tools.tables import WorkerKind, whole

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GenArguments:
    """The arguments of gen. `device_type` and `device_ip_from` are detected if None; `worker`: as in GenRequest."""

    prefill_server_list: Sequence[str]
    decode_server_list: Sequence[str]
    api_server: bool
    save_dir: str
    ip: str | None = None
    ports: str | None = None
    device_type: DeviceKind | None = None
    device_ip_from: AddressSource | None = None
    share_devices: bool = False
    worker: WorkerKind | None = None


def gen(
    arguments: GenArguments, say: Say, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Generated:
    """Write the tables of this host and return them. Raises RanktableError before anything is written.

    `root` is the folder that contains the machine's /dev and /etc/hccn.conf.
    """
    request = _request(arguments)
    kind = arguments.device_type or find_kind(root / "dev")
    if request.share_devices and not may_share(kind):
        raise RanktableError("--share-devices is for GPUs: an NPU can only be in one instance")
    check_request(request)
    _refuse_other_devices(request, arguments.save_dir)
    generated = build(request, _device_ips(request, kind, arguments.device_ip_from, environ, root / "etc/hccn.conf"))
    _save(generated, arguments.save_dir, say)
    absent = absent_note(kind, request.device_ids, present_devices(kind, root / "dev"))
    stale = _stale_note(generated, request.ip, arguments.save_dir)
    for note in (
        _address_note(arguments, request),
        tensor_parallel_note([*map(len, request.instances)]),
        absent,
        stale,
    ):
        if note is not None:
            say(f"Note: {note}")
    say(f"Generate global ranktable successful, host ip is {request.ip}")
    say("Generate local ranktable successful.")
    return generated


def _request(arguments: GenArguments) -> GenRequest:
    prefill = parse_device_lists("--prefill-server-list", arguments.prefill_server_list)
    decode = parse_device_lists("--decode-server-list", arguments.decode_server_list)
    num_instances = len(prefill) + len(decode)
    ports = () if arguments.ports is None else parse_ports(arguments.ports, num_instances)
    return GenRequest(
        prefill, decode, arguments.api_server, arguments.ip or own_address(), ports, arguments.share_devices,
        arguments.worker,
    )  # fmt: skip


def _address_note(arguments: GenArguments, request: GenRequest) -> str | None:
    if arguments.ip is not None or request.ip != "127.0.0.1":
        return None
    return "no address was found at which other hosts reach this one. Please provide it via --ip argument."


def _stale_note(generated: Generated, ip: str, save_dir: str) -> str | None:
    """Name local tables in `save_dir` from an earlier gen: this host's, or any host's if this table is complete."""
    pattern = "local_ranktable_*.json" if whole(generated.part) is not None else f"local_ranktable_{ip}_*.json"
    names = {path.name for path in Path(save_dir).glob(pattern)} - {local.file_name for local in generated.locals}
    if not names:
        return None
    return (
        f"{save_dir} has local tables from an earlier gen that do not belong to this global table: "
        f"{', '.join(sorted(names))}"
    )


def _device_ips(
    request: GenRequest, kind: DeviceKind, source: AddressSource | None, environ: Mapping[str, str], conf: Path
) -> dict[str, str]:
    if source is not None and not has_own_network(kind):
        raise RanktableError(f"--device-ip-from {source} is for npu; {kind} devices have the host's address")
    return card_addresses(kind, request.device_ids, request.ip, environ, source=source, conf=conf)


def _refuse_other_devices(request: GenRequest, save_dir: str) -> None:
    """Raise RanktableError if a file to be written exists as the local table of other devices.

    Ids are joined without a separator in file names: the files of devices 1,23 and of devices 12,3 have the same name.
    """
    for ids, name in zip(request.instances, request.file_names, strict=True):
        path = os.path.join(save_dir, name)
        try:
            there = read_local(path).server.device_ids
        except RanktableError:
            continue  # no file is there, or no local table that a process could start from
        if there != ids:
            raise RanktableError(
                f"{path} exists for devices {','.join(there)} and would be overwritten for {','.join(ids)}; nothing "
                "was written: use another --save-dir, or remove that file"
            )


def _save(generated: Generated, save_dir: str, say: Say) -> None:
    make_directory(save_dir)
    write_global(Path(save_dir, generated.global_name), generated.part)
    say(f"Save {os.path.join(save_dir, generated.global_name)}")
    for local in generated.locals:
        write_local(Path(save_dir, local.file_name), local.table)
        say(f"Save {os.path.join(save_dir, local.file_name)}")
