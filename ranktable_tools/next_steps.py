"""The commands to run after gen or merge."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranktable_tools.generate import Generated, NamedLocal
from ranktable_tools.tables import InstanceEntry, whole
from ranktable_tools.worker_kind import VARIABLE

_FIRST_PORT, _PUBLIC_PORT = 8088, 9000


def after_gen(generated: Generated, save_dir: str) -> list[str]:
    """Return the commands that start this host's processes, or, for a partial table, how to merge it."""
    global_path = os.path.join(save_dir, generated.global_name)
    if whole(generated.part) is None:
        return [
            "This table covers one host. Generate those of the other hosts and merge them all:",
            f"  ranktable merge --global-ranktable-list {shlex.quote(global_path)} OTHER_GLOBAL_RANKTABLE",
        ]
    return [
        "Next, each in its own shell, in any order:",
        *_start_lines(generated, global_path, save_dir),
        "Before that, and once all are up, this checks the host, its processes and their links:",
        f"  {_missing_ports(generated)}ranktable doctor{_sharing(generated)} {shlex.quote(global_path)}",
    ]


def after_merge(merged_path: str, secret_path: str) -> list[str]:
    """Return the instructions for the other hosts."""
    return [
        f"Next: copy {merged_path} and {secret_path} to every host, side by side, and start the processes there.",
        "Before that, and once all are up, this checks a host, its processes and its links:",
        f"  ranktable doctor {shlex.quote(os.path.basename(merged_path))} LOCAL_RANKTABLE",
    ]


def _start_lines(generated: Generated, global_path: str, save_dir: str) -> Iterator[str]:
    ports = [_port(instance) for instance in generated.part.instances]
    flags = _sharing(generated)
    for instance, local, port in zip(generated.part.instances, generated.instances, ports, strict=True):
        yield _line(global_path, save_dir, local, _worker(instance), port) + f"{flags}  # {instance}"
    assert generated.host is not None
    scheduler = _line(global_path, save_dir, generated.host, _node_ports(generated), _public_port(ports))
    yield f"{scheduler}{flags}  # scheduler, the public port"


def _worker(instance: InstanceEntry) -> str:
    """Return the assignment that a worker of another engine is started with."""
    return "" if instance.server.worker is None else f"{VARIABLE}={instance.server.worker} "


def _line(global_path: str, save_dir: str, local: NamedLocal, variables: str, port: int) -> str:
    local_path = os.path.join(save_dir, local.file_name)
    return (
        f"  GLOBAL_RANK_TABLE_FILE_PATH={shlex.quote(global_path)} RANK_TABLE_FILE_PATH={shlex.quote(local_path)} "
        f"{variables}sh {shlex.quote(_launcher_path())} --model=MODEL --host=0.0.0.0 --port={port}"
    )


def _sharing(generated: Generated) -> str:
    """Return the flag that every process needs if two instances share a device, with a leading space."""
    ids = [device_id for instance in generated.part.instances for device_id in instance.server.device_ids]
    return " --share-devices" if len(ids) > len(set(ids)) else ""


def _node_ports(generated: Generated) -> str:
    return f"NODE_PORTS={','.join(str(_port(instance)) for instance in generated.part.instances)} "


def _missing_ports(generated: Generated) -> str:
    """Return the NODE_PORTS assignment that doctor needs, or "" if the table has all ports."""
    has_ports = all(instance.server.server_port for instance in generated.part.instances)
    return "" if has_ports else _node_ports(generated)


def _port(instance: InstanceEntry) -> int:
    return instance.server.server_port or _FIRST_PORT + instance.index


def _public_port(ports: Sequence[int]) -> int:
    """Return the guide's port of the scheduler, or the next one that no instance uses."""
    return next(port for port in range(_PUBLIC_PORT, 65536) if port not in ports)


def _launcher_path() -> str:
    launcher = Path(__file__).resolve().parent.parent / "deploy" / "PD_separate" / "start_servers.sh"
    return str(launcher) if launcher.exists() else "deploy/PD_separate/start_servers.sh"
