"""Mooncake's transfer engine, one per process and address: its API, its errors, its ports, and its registered memory.

It can write to registered memory, and listens on all interfaces regardless of its settings: so it is started only
when first used, and the ports it opens are logged (docs/ports.md).
"""

import functools
import importlib
import importlib.metadata
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from devices.table import open_device, traits_of
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.staging import Staging
from telemetry.logs import EventLogger

_log = EventLogger("kvtransfer")
_TIMEOUT_VARIABLE, _ENGINE_TIMEOUT_S = "MC_TRANSFER_TIMEOUT", "5"  # the engine's minimum; its default is 30
_PORT_VARIABLES, _DEFAULT_PORTS = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"), (15_000, 17_000)  # the package's defaults
_MIN_PORT, _LAST_PORT = 1_024, 65_535  # the ports that the package accepts
_MAX_RETIRED = 16


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """How the engine reads: its own name for the protocol, the package for it, and whether it reads host memory.

    If not, it reads its device's memory, which it registers in pieces of 2 MiB.
    """

    protocol: str
    package: str
    on_host: bool


READ_METHODS = {
    "tcp": ReadMethod("tcp", "mooncake-transfer-engine-non-cuda", on_host=True),  # by RDMA if it finds a card
    "ascend": ReadMethod("ascend", "mooncake-transfer-engine-npu", on_host=False),  # HCCS or RoCE; we have never run it
}


def read_method_of(device: str) -> ReadMethod:
    """Return how the engine reads memory of `device`, such as "npu:0". Raises ConfigError."""
    return READ_METHODS[traits_of(device).one_sided]


class StagingMemory(Protocol):
    """Staging memory as the engine and its links use it: on the host (staging.py) or a device (device_staging.py)."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def gather(self, start: int, source: RegionRuns) -> None:
        """Copy the source's runs to `start`, one after another; the copy is complete when it returns."""
        ...

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` to the target's runs; return their digest (0 without `digests`), None if `stop` was set."""
        ...


class MooncakeEngine:
    """The package's engine at one address; translates its status codes to OSError. It reads memory on `device`."""

    def __init__(self, host: str, device: str = "cpu") -> None:
        """Start it: it listens from now on. Raises OSError."""
        self._method, self._name = read_method_of(device), device
        self._device = None if self._method.on_host else open_device(device)
        self._activate()
        os.environ.setdefault(_TIMEOUT_VARIABLE, _ENGINE_TIMEOUT_S)
        self._host, self._engine = host, _package().TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", self._method.protocol, "")
        if status != 0:
            raise OSError(f"mooncake's engine failed to start at {host}: {status}")
        _log.warning("mooncake_listens", ports=open_ports(), note="TCP, on all interfaces: see docs/ports.md")

    @property
    def protocol(self) -> str:
        """Its protocol; a peer must use the same one."""
        return self._method.protocol

    @property
    def session(self) -> str:
        """Its name for a peer's engine: the address and port it listens on."""
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def make_memory(self, num_bytes: int) -> StagingMemory:
        """Return contiguous memory that it can read, aligned as its device's pools are. Raises OSError."""
        if self._device is None:
            return Staging(memoryview(mmap.mmap(-1, num_bytes)))
        from kvtransfer.device_staging import DeviceStaging

        try:
            return DeviceStaging(num_bytes, self._device.torch_device, self._device.traits.pool_alignment)
        except RuntimeError as error:  # torch's OutOfMemoryError is a RuntimeError
            raise OSError(f"cannot allocate {num_bytes} bytes of staging memory on {self._name}: {error}") from error

    def register(self, memory: StagingMemory) -> None:
        """Make `memory` readable by peers. Raises OSError if the engine fails to register it."""
        self._activate()
        status = self._engine.register_memory(memory.address, memory.num_bytes)
        if status != 0:
            raise OSError(f"the engine did not register {memory.num_bytes} bytes of staging memory: {status}")

    def unregister(self, memory: StagingMemory) -> None:
        """End the access of peers to `memory`. Raises OSError: then the engine may still access it."""
        self._activate()
        status = self._engine.unregister_memory(memory.address)
        if status != 0:
            raise OSError(f"the engine did not unregister {memory.num_bytes} bytes of staging memory: {status}")

    def read(self, session: str, memory: StagingMemory, address: int, num_bytes: int) -> None:
        """Read from `address` at the engine of `session` into the start of `memory`. Blocks. Raises OSError."""
        self._activate()
        status = self._engine.transfer_sync_read(session, memory.address, address, num_bytes)
        if status != 0:
            raise OSError(f"mooncake could not read {num_bytes} bytes at {session}: {status}")

    def _activate(self) -> None:
        """Make its device current in this thread, as calls on device memory require."""
        if self._device is not None:
            self._device.activate()


class Registered:
    """Staging memory registered with the engine. It stays mapped until the engine has unregistered it."""

    def __init__(self, engine: MooncakeEngine, num_bytes: int) -> None:
        """Raises OSError if the engine fails to register it."""
        self.engine = engine
        self.staging = engine.make_memory(num_bytes)
        self._lock = threading.Lock()
        engine.register(self.staging)
        self._registered = True

    def close(self, *, after_s: float = 0.0) -> None:
        """Unregister the memory, now or `after_s` seconds from now; idempotent.

        Until then the peer can still read this memory, and nothing else. If more than 16 are waiting, the oldest one
        is unregistered at once.
        """
        if after_s > 0:
            _unregister_later(self, after_s)
        else:
            _cancel_unregister(self)

    def take_back(self) -> None:
        """Unregister the memory now; idempotent."""
        with self._lock:
            registered, self._registered = self._registered, False
        if not registered:
            return
        try:
            self.engine.unregister(self.staging)
        except OSError as error:
            _log.warning("mooncake_memory_leaked", bytes=self.staging.num_bytes, error=error)
            _KEPT.append(self.staging)


_KEPT: list[StagingMemory] = []  # never unmapped: the engine may still access it
_RETIRED: dict[Registered, threading.Timer] = {}  # oldest first
_PARKING = threading.Lock()
_MAKING = threading.Lock()


def engine_at(host: str, device: str = "cpu") -> MooncakeEngine:
    """Return this process's engine for links at `host`; the first call starts it. Raises OSError.

    Devices whose memory is read through the host share one engine; every other device has its own.
    """
    with _MAKING:
        return _make_engine(host, "cpu" if read_method_of(device).on_host else device)


@functools.cache
def lacking(package: str = READ_METHODS["tcp"].package) -> str | None:
    """Return why the package cannot be used here, or None. Opens nothing."""
    host_build = READ_METHODS["tcp"].package
    remedy = "run scripts/install --with mooncake" if package == host_build else f"pip install {package}"
    try:
        _package()
    except ImportError as error:
        if "libibverbs" in str(error):
            return f"{error}: install Debian's libibverbs1"
        return f"the package {package} is missing ({error}): {remedy}"
    if package != host_build and is_installed(host_build):  # the host build would misread device addresses
        return f"the package {host_build} reads host memory only: {remedy} in its place"
    return None


def is_installed(package: str) -> bool:
    """Return whether a distribution of this name is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _package() -> Any:
    """Import the package, which reads its log level at import. Raises ImportError."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    return importlib.import_module("mooncake.engine")


@functools.cache
def warn_about_ports(host: str) -> None:
    """Log, once per process, which ports an engine at `host` will open."""
    first, last = _port_range()
    _log.warning(
        "mooncake_will_listen", host=host, ports=f"{first}-{last}",
        note="two of these TCP ports, on all interfaces, from the first proven link on: see docs/ports.md",
    )  # fmt: skip


def open_ports() -> list[int]:
    """Return mooncake's TCP ports: those open on all interfaces, where pdserve opens none of its own by default."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table, wildcard in (("/proc/self/net/tcp", "0" * 8), ("/proc/self/net/tcp6", "0" * 32)):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        for row in rows:
            address, _, port = row[1].partition(":")
            if row[3] == "0A" and address == wildcard and row[9] in inodes:
                ports.add(int(port, 16))
    return sorted(ports)


def _port_range() -> tuple[int, int]:
    """Return the engine's port range from the environment, read as the engine reads it: invalid values are ignored."""
    texts = [os.environ.get(name) for name in _PORT_VARIABLES]
    try:
        first, last = (
            default if text is None else int(text) for text, default in zip(texts, _DEFAULT_PORTS, strict=True)
        )
    except ValueError:
        return _DEFAULT_PORTS
    return (first, last) if _MIN_PORT <= first <= last <= _LAST_PORT else _DEFAULT_PORTS


@functools.cache
def _make_engine(host: str, device: str) -> MooncakeEngine:
    return MooncakeEngine(host, device)


def _unregister_later(memory: Registered, after_s: float) -> None:
    """Keep `memory` registered for `after_s` seconds; a timer thread then unregisters it."""
    timer = threading.Timer(after_s, _cancel_unregister, (memory,))
    timer.name, timer.daemon = "kv-mooncake-park", True
    with _PARKING:
        if memory in _RETIRED:
            return
        _RETIRED[memory] = timer
        crowded = next(iter(_RETIRED)) if len(_RETIRED) > _MAX_RETIRED else None
    if crowded is not None:
        _cancel_unregister(crowded)
    try:
        timer.start()
    except RuntimeError:  # no thread can be started
        _cancel_unregister(memory)


def _cancel_unregister(memory: Registered) -> None:
    with _PARKING:
        timer = _RETIRED.pop(memory, None)
    if timer is not None:
        timer.cancel()
    memory.take_back()
