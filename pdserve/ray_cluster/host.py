"""One instance on its node: the folder with its tables, its process, and its log. Independent of Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve import __version__
from pdserve.ports import free_ports, require_free
from pdserve.process_plan import ProcessPlan, launch_command
from pdserve.processes import Child, stop
from pdserve.ray_cluster.messages import LaunchRequest, NodeRequest, Placement, PollReply, PollRequest
from pdserve.ray_cluster.private_folder import PrivateFolder
from ranktable_tools.devices.card_addresses import card_addresses
from ranktable_tools.devices.kinds import kind_named
from ranktable_tools.json_file import write_private
from ranktable_tools.secret import SECRET_NAME
from wire.errors import ConfigError, Incompatible

_MAX_BYTES = 65_536
_SET_BY_RAY = ("RAY_", "OMP_NUM_THREADS")  # set by Ray for its workers: an instance counts its own threads


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node as Ray reports it: id, address, and the ids of the devices assigned to us, by resource."""

    node_id: str
    ip: str
    device_ids: Mapping[str, Sequence[str]]


class RayInstanceHost:
    """Owns the instance's folder and process. The process dies with the thread that starts it."""

    def __init__(self, node: NodePlace, environ: Mapping[str, str], temporary: Path | None = None) -> None:
        self._node = node
        self._environ = {key: value for key, value in environ.items() if not key.startswith(_SET_BY_RAY)}
        self._private = PrivateFolder(temporary)
        self._child: Child | None = None
        self._port: int | None = None
        self._global_name = ""

    def place(self, request: NodeRequest) -> Placement:
        """Return the instance's address and devices. Raises Incompatible, RanktableError if an NPU has no address."""
        if request.version != __version__:
            raise Incompatible(
                f"pdserve {__version__} is installed on this node, but {request.version} where `up` runs"
            )
        ids = self._device_ids(request)
        ips = card_addresses(kind_named(request.kind), ids, self._node.ip, self._environ)
        self._port = self._free_port()
        node = self._node
        return Placement(node.node_id, node.ip, self._port, ids, tuple(ips[device_id] for device_id in ids))

    def start(self, request: LaunchRequest) -> None:
        """Write the files and start the process, the first one or a replacement. Raises OSError, ConfigError."""
        if self._child is not None and self._child.exit_status is None:
            raise ConfigError(f"{request.name} already runs here, as pid {self._child.record.pid}")
        if self._port is None:
            raise ConfigError(f"{request.name} is not placed here yet")
        for name, text in (
            (request.global_name, request.global_table), (request.local_name, request.local_table),
            (SECRET_NAME, request.secret),
        ):  # fmt: skip
            self._write(name, text)
        self._global_name = request.global_name
        plan = ProcessPlan(
            request.name, request.role, f"{self._node.ip}:{self._port}",
            launch_command(self._node.ip, self._port, request.flags),
            {
                "GLOBAL_RANK_TABLE_FILE_PATH": str(self._private.path / request.global_name),
                "RANK_TABLE_FILE_PATH": str(self._private.path / request.local_name),
            },
        )  # fmt: skip
        folder = Path(request.folder)
        self._child = Child(plan, self._log, self._environ, again=True, folder=folder if folder.is_dir() else None)

    def poll(self, request: PollRequest) -> PollReply:
        """Return the process's status and complete lines of its log, 64 KiB at most.

        Once the process has ended, a partial last line is returned too.

        A new global table replaces the old one by a rename, which the process notices.
        """
        assert self._child is not None, "start() was called"
        if request.global_table is not None:
            self._write(self._global_name, request.global_table)
        status = self._child.exit_status  # before reading the log, which is then complete
        with self._log.open("rb") as file:
            file.seek(request.offset)
            data = file.read(_MAX_BYTES + 1)  # one read: lines written meanwhile are left for the next call
        data, more = data[:_MAX_BYTES], len(data) > _MAX_BYTES
        if status is None and not more:
            data = data[: data.rfind(b"\n") + 1]
        text = data.decode(errors="replace")
        return PollReply(self._child.record.pid, text, request.offset + len(data), more, status)

    def stop(self) -> bool:
        """Stop the process, by SIGTERM first, and delete the folder; return whether it had to be killed."""
        killed = False
        if self._child is not None:
            killed = bool(stop([self._child.record]))
            self._child.ended()  # reaps it, so that no zombie remains
        self._private.close()
        return killed

    @property
    def _log(self) -> Path:
        return self._private.path / "log"

    def _device_ids(self, request: NodeRequest) -> tuple[str, ...]:
        """Return the device ids assigned by Ray, if they are numbers and as many as requested, else those requested."""
        given = tuple(self._node.device_ids.get(request.kind, ()))
        is_numbers = all(device_id.isascii() and device_id.isdecimal() for device_id in given)
        return given if is_numbers and len(given) == len(request.device_ids) else request.device_ids

    def _free_port(self) -> int:
        """Return the previous port if it is still free, so that the table need not change, else a free one."""
        if self._port is not None:
            try:
                require_free(self._node.ip, self._port)
            except ConfigError:
                pass
            else:
                return self._port
        return free_ports(1, self._node.ip)[0]

    def _write(self, name: str, text: str) -> None:
        if Path(name).name != name:
            raise ConfigError(f"{name!r} is not a file name")
        write_private(self._private.path / name, text)
