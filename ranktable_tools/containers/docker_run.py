"""`deploy/docker_run.sh ROLE`: print, or run, the guide's `docker run` line with the devices of the table."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ranktable_tools.arguments import OneLineParser
from ranktable_tools.containers.docker import replace_by_docker
from ranktable_tools.containers.host_checks import Host, notes_of, require_ready
from ranktable_tools.containers.member import ContainerMember, find_member, find_table_kind, read_tables
from ranktable_tools.containers.mounts import own_mount, parse_mount
from ranktable_tools.containers.run_line import (
    DRIVER,
    HCCN_CONF,
    SHM_SIZE,
    Container,
    Line,
    run_line,
    shell_text,
    words_of,
)
from ranktable_tools.devices.kinds import KINDS, DeviceKind, find_kind
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import GLOBAL_VARIABLE, LOCAL_VARIABLE

_PROG = "docker_run.sh"
_ROLES = ("prefill", "decode", "scheduler")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_SIZE = re.compile(r"[1-9][0-9]*[bkmgBKMG]?")
_OTHER_SMI = "/usr/local/bin/npu-smi"
_EPILOG = """\
The command line goes to stdout, notes to stderr. Without --run nothing is started. A command after -- is run instead
of /bin/bash. Exit status: 0, 2 for bad input.

examples:
  docker_run.sh prefill --local-table local_ranktable_10.0.0.18_45.json --image pdserve --dir /data
  docker_run.sh scheduler --image pdserve --dir /data --run
  docker_run.sh decode --global-table global_ranktable_merge.json --instance 1 --image pdserve --dir /data
  docker_run.sh prefill --config cluster.yaml           each flag is a key there; needs PyYAML
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 for bad input. With --run, docker replaces this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    try:
        arguments = command_parser().parse_args(words[:cut])
        _refuse_empty(arguments)
        line = _line(arguments, tuple(words[cut + 1 :]), os.environ)
        print(shell_text(line), flush=True)
        if arguments.run:
            replace_by_docker(words_of(line))
    except RanktableError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2
    return 0


def command_parser() -> OneLineParser:
    """Return the parser of the command line, also for callers that inspect its flags."""
    parser = OneLineParser(prog=_PROG, description="Print (or run) the guide's docker run line.", epilog=_EPILOG)
    parser.add_argument("role", choices=_ROLES)
    parser.add_argument("--image", required=True, metavar="IMAGE", help="the inference image (build_image.sh)")
    parser.add_argument("--dir", required=True, metavar="DIR", help="this host's folder with model and tables")
    parser.add_argument("--container-work-dir", metavar="DIR", help="--dir in the container (default: the same path)")
    parser.add_argument("--local-table", metavar="FILE", help=f"default: {LOCAL_VARIABLE}")
    parser.add_argument("--global-table", metavar="FILE", help=f"default: {GLOBAL_VARIABLE}")
    parser.add_argument(
        "--instance", type=int, metavar="N", help="without a local table: the instance's number within its role, from 0"
    )
    parser.add_argument("--name", help="of the container (default: pdserve-ROLE-DEVICES)")
    parser.add_argument("--volume", action="append", default=[], metavar="HOST:CONTAINER[:ro]", help="one more mount")
    parser.add_argument("--shm-size", default=SHM_SIZE, metavar="SIZE", help=f"of /dev/shm (default: {SHM_SIZE})")
    parser.add_argument("--device-type", choices=KINDS, help="default: npu if the table's devices have their own "
                        "addresses, else this host's kind")  # fmt: skip
    parser.add_argument("--share-devices", action="store_true", help="let two containers use one GPU, never one NPU")
    parser.add_argument("--guide-exact", action="store_true", help="only what the guide's command line has")
    parser.add_argument("--run", action="store_true", help="run it, after checking that its mounts exist")
    return parser


def _refuse_empty(arguments: argparse.Namespace) -> None:
    """Raise RanktableError for the first flag with an empty value, such as a quoted variable that is not set."""
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.strip():
                flag = f"--{name.replace('_', '-')}"
                raise RanktableError(f"{flag} {text!r} is empty: set a value (is a variable not set?)")


def _line(arguments: argparse.Namespace, command: tuple[str, ...], environ: Mapping[str, str]) -> Line:
    tables = read_tables(
        arguments.global_table or environ.get(GLOBAL_VARIABLE),
        arguments.local_table or environ.get(LOCAL_VARIABLE),
        share_devices=arguments.share_devices,
    )
    member = find_member(arguments.role, tables, arguments.instance)
    kind = arguments.device_type or find_table_kind(tables) or find_kind()
    host = Host(member.server)
    if kind == "cuda" and member.server is not None and tables.whole is None:
        _print_note(
            "without --global-table this container's peers on this host are not known: their GPUs are not visible in "
            "the container, so cuda_ipc is not used"
        )
    container = _on_host(_container(arguments, member, kind, command), host)
    if arguments.run:
        require_ready(container, host)
    for note in notes_of(container, host, share=arguments.share_devices, strict=arguments.run):
        _print_note(note)
    return run_line(container)


def _print_note(text: str) -> None:
    print(f"{_PROG}: {text}", file=sys.stderr)


def _container(
    arguments: argparse.Namespace, member: ContainerMember, kind: DeviceKind, command: tuple[str, ...]
) -> Container:
    name = arguments.name or "-".join(("pdserve", member.role, *member.device_ids))
    if _NAME.fullmatch(name) is None:
        raise RanktableError(f"--name {name!r}: docker allows at most 128 letters, digits, _, . and -")
    if _SIZE.fullmatch(arguments.shm_size) is None:
        raise RanktableError(f"--shm-size {arguments.shm_size!r}: write a number and k, m or g, like {SHM_SIZE}")
    if arguments.image.startswith("-"):
        raise RanktableError(f"--image {arguments.image!r} is not an image name")
    flag = "--dir" if arguments.container_work_dir is None else "--container-work-dir"
    return Container(
        role=member.role, kind=kind, device_ids=member.device_ids, name=name, image=arguments.image,
        work=own_mount(flag, arguments.dir, arguments.container_work_dir or arguments.dir),
        volumes=tuple(parse_mount("--volume", text) for text in arguments.volume),
        peer_ids=member.peer_ids, shm_size=arguments.shm_size, guide_exact=arguments.guide_exact,
        command=command or ("/bin/bash",),
    )  # fmt: skip


def _on_host(container: Container, host: Host) -> Container:
    """Return the container without mounts that this host lacks; unchanged for another host, whose files are unknown."""
    if not host.is_here or container.guide_exact or not host.has(DRIVER):
        return container
    smi = container.smi if host.has(container.smi) or not host.has(_OTHER_SMI) else _OTHER_SMI
    return replace(container, smi=smi, with_hccn_conf=host.has(HCCN_CONF))


if __name__ == "__main__":
    raise SystemExit(main())
