"""The guide's `docker run` line, and what is added to it. Pure.

The order of the flags is the guide's; `guide_exact` leaves out all that the guide does not have.
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
"""A command line; words that belong together are one tuple."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of the cluster; `peer_ids` are the GPUs of this host's instances that it exchanges KV with."""

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
        """Whether the driver and the manager nodes belong in it: the scheduler computes on nothing."""
        return self.guide_exact or (self.kind == "npu" and self.role != "scheduler")


def run_line(container: Container) -> Line:
    """Return the line; image and command come last."""
    return (
        ("docker", "run", "-itd"),
        *_devices(container),
        *(("-v", str(mount)) for mount in (_LOCALTIME, *_driver(container))),
        *_managers(container),
        *(("-v", str(mount)) for mount in mounts_after(container)),
        ("--net=host",),
        *(() if container.guide_exact else _added(container)),
        ("--name", container.name),
        (container.image,),
        container.command,
    )


def all_mounts(container: Container) -> tuple[Mount, ...]:
    """Return every mount of the line: docker makes an empty folder of a source that is not there."""
    return (_LOCALTIME, *_driver(container), *mounts_after(container))


def mounts_after(container: Container) -> tuple[Mount, ...]:
    """Return the mounts that the guide has after the manager nodes, and those added."""
    tools = (Mount(LOGS, "/usr/slog"), Mount(container.smi, container.smi)) if container.has_npus else ()
    addresses = Mount(HCCN_CONF, HCCN_CONF, "ro")
    added = (addresses,) if container.has_npus and container.with_hccn_conf and not container.guide_exact else ()
    return (*tools, _CGROUP, *added, container.work, *container.volumes)


def shell_text(line: Line) -> str:
    """Return the line as one types it, each flag on a line of its own."""
    return " \\\n    ".join(shlex.join(words) for words in line)


def words_of(line: Line) -> list[str]:
    """Return the line as an argument list."""
    return [word for words in line for word in words]


def _devices(container: Container) -> Iterator[tuple[str, ...]]:
    if container.has_npus:
        for device_id in container.device_ids:
            yield (f"--device=/dev/davinci{device_id}",)
    elif container.kind == "cuda" and container.device_ids:
        yield from _gpus(container)


def _gpus(container: Container) -> Iterator[tuple[str, ...]]:
    """Yield the flags of GPUs: its own alone, or, where cuda_ipc is possible, all, its own seen first.

    cuda_ipc opens the sender's pool on the sender's GPU, so the receiver has to see that one too. Only with all of them
    are the numbers inside those of the host, and of the table.
    """
    if not container.peer_ids:
        # The quotes belong to the value: it is read as a line of CSV.
        yield ("--gpus", f'"device={",".join(container.device_ids)}"')
        return
    seen = dict.fromkeys((*container.device_ids, *container.peer_ids))
    yield ("--gpus", "all")
    yield ("-e", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    yield ("-e", f"CUDA_VISIBLE_DEVICES={','.join(seen)}")


def _driver(container: Container) -> tuple[Mount, ...]:
    return (Mount(DRIVER, DRIVER), _INSTALL_INFO) if container.has_npus else ()


def _managers(container: Container) -> Iterator[tuple[str, ...]]:
    if container.has_npus:
        yield from ((f"--device={node}",) for node in MANAGERS)


def _added(container: Container) -> Iterator[tuple[str, ...]]:
    """Yield what the guide does not have: shared memory, memory that may be locked, and whose cards these are.

    CUDA's handles name the process that made them: two containers that number their processes alike would take each
    other's for their own, so they share the host's numbers and its IPC names, and with these its /dev/shm.
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
