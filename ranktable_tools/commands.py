"""Carry out gen and merge: ask the devices, write the files, say what was saved. Both command lines call these."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktable_tools.addresses import own_address
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
from ranktable_tools.hccn import default_device_type, device_addresses, find_hccn_tool
from ranktable_tools.merge import MERGED_NAME, NamedPart, check_enough, merge
from ranktable_tools.table_file import read_part, write_global, write_local
from ranktable_tools.tables import GlobalTable

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GenArguments:
    """What was typed to gen."""

    prefill_server_list: Sequence[str]
    decode_server_list: Sequence[str]
    api_server: bool
    save_dir: str
    ip: str | None = None
    ports: str | None = None
    device_type: str | None = None


def gen(arguments: GenArguments, say: Say, environ: Mapping[str, str] = os.environ) -> Generated:
    """Write the tables of this host and return them. Raises RanktableError before anything is written."""
    request = _request(arguments)
    check_request(request)
    kind = arguments.device_type or default_device_type(environ)
    generated = build(request, _device_ips(request, kind, environ))
    _save(generated, arguments.save_dir, say)
    note = tensor_parallel_note(request)
    if note is not None:
        say(f"Note: {note}")
    say(f"Generate global ranktable successful, host ip is {request.ip}")
    say("Generate local ranktable successful.")
    return generated


def merge_files(paths: Sequence[str], save_dir: str, say: Say) -> GlobalTable:
    """Merge the global tables in `paths` into one file in `save_dir` and return it."""
    check_enough(paths)
    table = merge([NamedPart(path, read_part(path)) for path in paths])
    _make_directory(save_dir)
    write_global(Path(save_dir, MERGED_NAME), table)
    say(f"Save {os.path.join(save_dir, MERGED_NAME)}")
    say(f"Merge {len(paths)} global ranktable successful.")
    return table


def _request(arguments: GenArguments) -> GenRequest:
    prefill = parse_device_lists("--prefill-server-list", arguments.prefill_server_list)
    decode = parse_device_lists("--decode-server-list", arguments.decode_server_list)
    num_instances = len(prefill) + len(decode)
    ports = () if arguments.ports is None else parse_ports(arguments.ports, num_instances)
    return GenRequest(prefill, decode, arguments.api_server, arguments.ip or own_address(), ports)


def _device_ips(request: GenRequest, kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    if kind != "npu":
        return dict.fromkeys(request.device_ids, request.ip)
    tool = find_hccn_tool(environ)
    if tool is None:
        raise RanktableError("hccn_tool is not found: set HCCN_TOOL_PATH, or choose another --device-type than npu")
    return device_addresses(tool, request.device_ids)


def _save(generated: Generated, save_dir: str, say: Say) -> None:
    _make_directory(save_dir)
    write_global(Path(save_dir, generated.global_name), generated.part)
    say(f"Save {os.path.join(save_dir, generated.global_name)}")
    for local in generated.locals:
        write_local(Path(save_dir, local.file_name), local.table)
        say(f"Save {os.path.join(save_dir, local.file_name)}")


def _make_directory(save_dir: str) -> None:
    try:
        os.makedirs(save_dir, exist_ok=True)
    except OSError as error:
        raise RanktableError(f"--save-dir {save_dir}: cannot be made: {error.strerror}") from error
