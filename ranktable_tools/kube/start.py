"""In each member: generate its tables, wait until the cluster's table includes them, run the role's process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.devices.kinds import DeviceKind, find_kind
from ranktable_tools.devices.npu_addresses import AddressSource
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import write_private
from ranktable_tools.kube.names import PART_FILE, TABLE_FILE
from ranktable_tools.kube.own_devices import own_device_ids
from ranktable_tools.kube.retry_loop import Say
from ranktable_tools.kube.waiting import NotYet, WaitLimits, wait_for
from ranktable_tools.launch_plan import GLOBAL_VARIABLE, LOCAL_VARIABLE
from ranktable_tools.matching import find_own_entry
from ranktable_tools.table_file import read_global, read_local
from ranktable_tools.tables import Role
from ranktable_tools.worker_kind import requested_worker

_SECRET_VARIABLE = "PDSERVE_SECRET_FILE"  # noqa: S105 - the name of a variable
_SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name


@dataclass(frozen=True, slots=True)
class Start:
    """This pod's role, address, devices and port, and the folder that it shares with its announcer."""

    role: Role
    ip: str
    folder: Path
    num_devices: int = 1
    port: int | None = None
    device_type: DeviceKind | None = None
    device_ip_from: AddressSource | None = None
    secret: Path | None = None


def variables(start: Start, local: Path, table: Path) -> dict[str, str]:
    """Return the environment of the role's process, and copy the secret to a file that the process owns."""
    environ = {GLOBAL_VARIABLE: str(table), LOCAL_VARIABLE: str(local)}
    if start.secret is None:
        return environ
    try:
        secret = start.secret.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise RanktableError(f"--secret {start.secret}: cannot be read: {error}") from error
    # A mounted Secret is root's and readable by a group; the process requires its own file of mode 0600.
    path = start.folder / _SECRET_NAME
    write_private(path, secret)
    return {**environ, _SECRET_VARIABLE: str(path)}


def generate(start: Start, say: Say, environ: Mapping[str, str], root: Path = Path("/")) -> Path:
    """Run `ranktable gen` for this pod, leave the pod's part for the announcer, and return the path of its local table.

    Raises RanktableError.
    """
    kind = start.device_type or find_kind(root / "dev")
    is_scheduler = start.role == "scheduler"
    ids = [] if is_scheduler else [",".join(own_device_ids(kind, start.num_devices, environ, root / "dev"))]
    made = gen(
        GenArguments(
            ids if start.role == "prefill" else (), ids if start.role == "decode" else (), is_scheduler,
            str(start.folder / "own"), start.ip, None if start.port is None or is_scheduler else str(start.port), kind,
            None if is_scheduler else start.device_ip_from,
            worker=None if is_scheduler else requested_worker(environ),
        ),
        say, environ, root,
    )  # fmt: skip
    own = start.folder / "own"
    write_private(start.folder / PART_FILE, (own / made.global_name).read_text(encoding="utf-8"))
    return own / made.locals[0].file_name


def wait_for_table(start: Start, local: Path, limits: WaitLimits) -> Path:
    """Return the cluster's table once it is complete and has this pod in its role; RanktableError on timeout."""
    path = start.folder / TABLE_FILE
    wait_for("the cluster's table", lambda: _check_table(start.role, path, local), limits)
    return path


def exec_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace this process by the command. Raises RanktableError if there is none."""
    if not command:
        raise RanktableError("no command: write it after --, as start ... -- sh start_servers.sh --model=/models/m")
    try:
        os.execvpe(command[0], list(command), {**os.environ, **environ})  # noqa: S606 - the manifest's own command
    except OSError as error:
        raise RanktableError(f"{command[0]}: cannot be run: {error.strerror}") from error


def _check_table(role: Role, path: Path, local: Path) -> None:
    """Raise NotYet while this pod cannot start: the table may still have an earlier pod at its address."""
    if not path.exists():
        raise NotYet(f"{path} is not there yet")
    try:
        entry = find_own_entry(read_local(str(local)), read_global(str(path)))
    except RanktableError as error:
        raise NotYet(str(error)) from error
    found = "scheduler" if entry is None else entry.role
    if found != role:
        raise NotYet(f"{path}: this pod's entry is {found} and not {role}")
