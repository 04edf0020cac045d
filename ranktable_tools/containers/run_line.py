"""The guide's `docker run` command line and pdserve's additions. Pure.

The order of the flags is the guide's; `guide_exact` omits all additions.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ranktable_tools.containers.mounts import Mount
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.tables import Role

CARDS_LABEL = "pdserve.cards"
DRIVER = "/usr/local/Ascend/driver"
SMI = "/usr/local/sbin/npu-smi"
HCCN_CONF = "/etc/hccn.conf"
LOGS = "/var/log/npu/"
SHM_SIZE = "1g"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_LOCALTIME = Mount("/etc/localtime", "/etc/localtime")
_CGROUP = Mount("/sys/fs/cgroup", "/sys/fs/cgroup", "ro")
_INSTALL_INFO = Mount("/etc/ascend_install.info", "/etc/ascend_install.info")

Line = tuple[tuple[str, ...], ...]
"""A command line; arguments that belong together are one tuple."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of the cluster; `peer_ids` are the GPUs of the KV peers on this host."""

    role: Role
    kind: DeviceKind
    device_ids: tuple[str, ...]
    name: str
    image: str
    work: Mount
    volumes: tuple[Mount, ...] = ()
    peer_ids: tuple[str, ...] = ()
    shm_size: str = SHM_SIZE
    command: tuple[str, ...] = ("/bin/bash",)
    guide_exact: bool = False
    smi: str = SMI
    with_hccn_conf: bool = True

    @property
    def has_npus(self) -> bool:
        """Whether it needs the driver and the manager nodes; the scheduler uses no device."""
        return self.guide_exact or (self.kind == "npu" and self.role != "scheduler")


def run_line(container: Container) -> Line:
    """Return the command line; image and command come last."""
    return (
        ("docker", "run", "-itd"),
        *_devices(container),
        *(("-v", str(mount)) for mount in (_LOCALTIME, *_driver_mounts(container))),
        *_manager_devices(container),
        *(("-v", str(mount)) for mount in mounts_after(container)),
        ("--net=host",),
        *(() if container.guide_exact else _added_flags(container)),
        ("--name", container.name),
        (container.image,),
        container.command,
    )


def all_mounts(container: Container) -> tuple[Mount, ...]:
    """Return every mount of the line, to check them: docker makes an empty folder for a missing source."""
    return (_LOCALTIME, *_driver_mounts(container), *mounts_after(container))


def mounts_after(container: Container) -> tuple[Mount, ...]:
    """Return the guide's mounts after the manager nodes, and the additional ones."""
    tools = (Mount(LOGS, "/usr/slog"), Mount(container.smi, container.smi)) if container.has_npus else ()
    addresses = Mount(HCCN_CONF, HCCN_CONF, "ro")
    added = (addresses,) if container.has_npus and container.with_hccn_conf and not container.guide_exact else ()
    return (*tools, _CGROUP, *added, container.work, *container.volumes)


def shell_text(line: Line) -> str:
    """Return the command line as shell text, one flag per line."""
    return " \\\n    ".join(shlex.join(words) for words in line)


def words_of(line: Line) -> list[str]:
    """Return the line as an argument list."""
    return [word for words in line for word in words]


def _devices(container: Container) -> Iterator[tuple[str, ...]]:
    if container.has_npus:
        for device_id in container.device_ids:
            yield (f"--device=/dev/davinci{device_id}",)
    elif container.kind == "cuda" and container.device_ids:
        yield from _gpu_flags(container)


def _gpu_flags(container: Container) -> Iterator[tuple[str, ...]]:
    """Yield the GPU flags: only the container's own GPUs or, if cuda_ipc is possible, all GPUs, its own first.

    cuda_ipc reads the sender's GPU, whose device node the receiver's container needs. Only with all GPUs visible do the
    numbers in the container equal those of the host and the table.
    """
    if not container.peer_ids:
        # The quotes are part of the value, which docker parses as a line of CSV.
        yield ("--gpus", f'"device={",".join(container.device_ids)}"')
        return
    seen = dict.fromkeys((*container.device_ids, *container.peer_ids))
    yield ("--gpus", "all")
    yield ("-e", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    yield ("-e", f"CUDA_VISIBLE_DEVICES={','.join(seen)}")


def _driver_mounts(container: Container) -> tuple[Mount, ...]:
    return (Mount(DRIVER, DRIVER), _INSTALL_INFO) if container.has_npus else ()


def _manager_devices(container: Container) -> Iterator[tuple[str, ...]]:
    if container.has_npus:
        yield from ((f"--device={node}",) for node in MANAGERS)


def _added_flags(container: Container) -> Iterator[tuple[str, ...]]:
    """Yield the additions to the guide: shared memory, the limit on locked memory, and a label that lists the cards.

    CUDA's IPC handles contain the process id of their creator. Containers with PID namespaces of their own can have
    equal process ids, so CUDA would confuse their handles. They therefore use the host's PID and IPC namespaces, and
    with the latter the host's /dev/shm.
    """
    if container.role == "scheduler":
        return
    if container.kind == "cuda":
        yield from (("--ipc=host",), ("--pid=host",))
    else:
        yield (f"--shm-size={container.shm_size}",)
    yield ("--ulimit", "memlock=-1:-1")
    if container.kind != "cpu":
        yield ("--label", f"{CARDS_LABEL}={','.join(container.device_ids)}")
