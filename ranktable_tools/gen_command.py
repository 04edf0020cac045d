"""`ranktable gen`: write this host's tables, and print the commands to start with them."""

import argparse
import os
from pathlib import Path

from ranktable_tools.arguments import OneLineParser, add_command, add_device_lists, add_ip, add_owner, add_save_dir
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.devices.kinds import KINDS
from ranktable_tools.devices.npu_addresses import SOURCES
from ranktable_tools.next_steps import after_gen
from ranktable_tools.secret import change_owner, check_owner, check_secret, ensure_secret
from ranktable_tools.tables import WORKER_KINDS, whole
from ranktable_tools.worker_kind import requested_worker


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "gen", "Write this host's tables.")
    add_device_lists(parser)
    parser.add_argument(
        "--api-server",
        action=argparse.BooleanOptionalAction,
        help="the scheduler is on this host (default: if both lists are given)",
    )
    add_save_dir(parser)
    add_owner(parser)
    add_ip(parser)
    parser.add_argument("--ports", metavar="P,P", help="write each instance's port into the table, prefill first")
    add_device_flags(parser)
    parser.add_argument("--share-devices", action="store_true", help="let two instances share one GPU (never an NPU)")
    parser.add_argument(
        "--worker", choices=WORKER_KINDS, help="the instances are workers of this engine (default: PDSERVE_WORKER)"
    )
    parser.set_defaults(command=_run_gen)


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that override the detected device type and the source of device addresses."""
    parser.add_argument(
        "--device-type", choices=KINDS, help="default: npu if one is in /dev, cuda if a GPU is, else cpu"
    )
    parser.add_argument(
        "--device-ip-from",
        choices=SOURCES,
        help="npu: ip runs hccn_tool -ip (default if installed), vnic hccn_tool -vnic (A3 pods), conf reads "
        "/etc/hccn.conf (default without hccn_tool)",
    )


def _run_gen(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.save_dir)
    both = bool(arguments.prefill_server_list and arguments.decode_server_list)
    with_scheduler = both if arguments.api_server is None else arguments.api_server
    if arguments.owner is not None:
        check_owner(folder, arguments.owner)
    if both and with_scheduler:
        check_secret(folder, arguments.owner, can_give=True)
    generated = gen(_gen_arguments(arguments, with_scheduler), print)
    if arguments.api_server is None and both:
        print("Both lists were given, so the scheduler is on this host too (--no-api-server omits it).")
    written = [folder / name for name in (generated.global_name, *(local.file_name for local in generated.locals))]
    if whole(generated.part) is not None:
        path, is_new = ensure_secret(folder, arguments.owner)
        print(f"Save {path}" if is_new else f"Keep {path}")
        written.append(path)
    if arguments.owner is not None:
        for path in written:
            change_owner(path, arguments.owner)
        print(f"All {len(written)} files belong to uid {arguments.owner}.")
    print("\n".join(after_gen(generated, arguments.save_dir)))
    return 0


def _gen_arguments(arguments: argparse.Namespace, with_scheduler: bool) -> GenArguments:
    return GenArguments(
        arguments.prefill_server_list, arguments.decode_server_list, with_scheduler, arguments.save_dir, arguments.ip,
        arguments.ports, arguments.device_type, arguments.device_ip_from, arguments.share_devices,
        arguments.worker or requested_worker(os.environ),
    )  # fmt: skip
