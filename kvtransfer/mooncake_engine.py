"""Mooncake's transfer engine, one a process and address: its API, its errors, its ports, and the memory it knows.

It can write into memory that is registered, and it listens on all interfaces whatever it is told: so it is made no
sooner than somebody asks for it, and what it opens is said in the log (docs/ports.md).
"""

import functools
import importlib
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
_TIMEOUT_VARIABLE, _ENGINE_TIMEOUT_S = "MC_TRANSFER_TIMEOUT", "5"  # its least; its own default is 30
_PORT_VARIABLES, _DEFAULT_PORTS = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"), (15_000, 17_000)  # the package's own
_LEAST_PORT, _LAST_PORT = 1_024, 65_535  # what it takes for a port
_MOST_PARKED = 16


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """How the engine reads, by its own name for it: which package has it, and whether it reads host memory.

    Else it reads memory of its device, which it knows by pieces of 2 MiB.
    """

    protocol: str
    package: str
    on_host: bool


WAYS = {
    "tcp": ReadMethod("tcp", "mooncake-transfer-engine-non-cuda", on_host=True),
    "ascend": ReadMethod("ascend", "mooncake-transfer-engine-npu", on_host=False),  # HCCS or RoCE; never run by us
}


def way_of(device: str) -> ReadMethod:
    """Return how memory of `device`, as "npu:0", is read. Raises ConfigError."""
    return WAYS[traits_of(device).one_sided]


class LentMemory(Protocol):
    """Staging memory as the engine and its links use it: of the host (staging.py) or a device (device_staging.py)."""

    @property
    def address(self) -> int:
        """Where it starts."""
        ...

    @property
    def num_bytes(self) -> int:
        """All of it."""
        ...

    def gather(self, start: int, source: RegionRuns) -> None:
        """Copy the source's runs one after another to `start`; they are there when it returns."""
        ...

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` into the target's runs; return their digest (0 without), None when `stop` cut it short."""
        ...


class MooncakeEngine:
    """The package's engine at one address, with what it returns turned into words. It reads memory of `device`."""

    def __init__(self, host: str, device: str = "cpu") -> None:
        """Start it: from here on it listens. Raises OSError."""
        self._way, self._name = way_of(device), device
        self._device = None if self._way.on_host else open_device(device)
        self._activate()
        os.environ.setdefault(_TIMEOUT_VARIABLE, _ENGINE_TIMEOUT_S)
        self._host, self._engine = host, _package().TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", self._way.protocol, "")
        if status != 0:
            raise OSError(f"mooncake's engine does not start at {host}: {status}")
        _log.warning("mooncake_listens", ports=open_ports(), note="TCP, on all interfaces: see docs/ports.md")

    @property
    def protocol(self) -> str:
        """How it reads; a peer's has to be the same."""
        return self._way.protocol

    @property
    def session(self) -> str:
        """What a peer's engine calls this one: its address and the port that it listens on."""
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def make_memory(self, num_bytes: int) -> LentMemory:
        """Return memory that it can read, in one piece and aligned as its device's pools are. Raises OSError."""
        if self._device is None:
            return Staging(memoryview(mmap.mmap(-1, num_bytes)))
        from kvtransfer.device_staging import DeviceStaging

        try:
            return DeviceStaging(num_bytes, self._device.torch_device, self._device.traits.pool_alignment)
        except RuntimeError as error:  # torch's own OutOfMemoryError is one
            raise OSError(f"no {num_bytes} bytes of staging memory on {self._name}: {error}") from error

    def register(self, memory: LentMemory) -> None:
        """Let peers read `memory`. Raises OSError when the engine does not take it."""
        self._activate()
        status = self._engine.register_memory(memory.address, memory.num_bytes)
        if status != 0:
            raise OSError(f"the engine did not register {memory.num_bytes} bytes of staging memory: {status}")

    def unregister(self, memory: LentMemory) -> None:
        """Let nobody read `memory` any more. Raises OSError: then the engine may still look at it."""
        self._activate()
        status = self._engine.unregister_memory(memory.address)
        if status != 0:
            raise OSError(f"the engine did not let go of {memory.num_bytes} bytes of staging memory: {status}")

    def read(self, session: str, memory: LentMemory, address: int, num_bytes: int) -> None:
        """Fill the start of `memory` from `address` on at the engine of `session`. Waits. Raises OSError."""
        self._activate()
        status = self._engine.transfer_sync_read(session, memory.address, address, num_bytes)
        if status != 0:
            raise OSError(f"mooncake could not read {num_bytes} bytes at {session}: {status}")

    def _activate(self) -> None:
        """Make its device this thread's: the calls of a device's memory want that."""
        if self._device is not None:
            self._device.activate()


class Registered:
    """Staging memory that the engine knows. It stays mapped until the engine has let go of it."""

    def __init__(self, engine: MooncakeEngine, num_bytes: int) -> None:
        """Raises OSError when the engine does not take it."""
        self.engine = engine
        self.staging = engine.make_memory(num_bytes)
        self._lock = threading.Lock()
        engine.register(self.staging)
        self._registered = True

    def close(self, *, after_s: float = 0.0) -> None:
        """Take the memory from the engine, now or `after_s` seconds from now; idempotent.

        Until then the peer can still read what was lent to it, and nothing else. Where more than 16 wait for their time
        the oldest of them goes at once.
        """
        if after_s > 0:
            _park(self, after_s)
        else:
            _unpark(self)

    def take_back(self) -> None:
        """Take the memory from the engine now; idempotent."""
        with self._lock:
            registered, self._registered = self._registered, False
        if not registered:
            return
        try:
            self.engine.unregister(self.staging)
        except OSError as error:
            _log.warning("mooncake_memory_kept", bytes=self.staging.num_bytes, reason=error)
            _KEPT.append(self.staging)


_KEPT: list[LentMemory] = []  # never unmapped: the engine may still look at it
_PARKED: dict[Registered, threading.Timer] = {}  # the oldest first
_PARKING = threading.Lock()
_MAKING = threading.Lock()


def engine_at(host: str, device: str = "cpu") -> MooncakeEngine:
    """Return this process's engine for links at `host`; the first call starts it. Raises OSError.

    Pools whose memory is read by way of the host share one, whatever their device; each other device has its own.
    """
    with _MAKING:
        return _make_engine(host, "cpu" if way_of(device).on_host else device)


@functools.cache
def lacking(package: str = WAYS["tcp"].package) -> str | None:
    """Return in words what keeps the package from being used here, or None. Opens nothing."""
    try:
        _package()
    except ImportError as error:
        if "libibverbs" in str(error):
            return f"{error}: install Debian's libibverbs1"
        return f"the package {package} is missing ({error}): run scripts/install --with mooncake"
    return None


def _package() -> Any:
    """Import it; it reads its log level then, and no more. Raises ImportError."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    return importlib.import_module("mooncake.engine")


@functools.cache
def warn_of_ports(host: str) -> None:
    """Say once a process which ports an engine at `host` will open."""
    first, last = _port_range()
    _log.warning(
        "mooncake_will_listen", host=host, ports=f"{first}-{last}",
        note="two TCP ports of these, on all interfaces, from the first proven link on: see docs/ports.md",
    )  # fmt: skip


def open_ports() -> list[int]:
    """TCP ports that this process listens on at all interfaces: mooncake's, since ours never do unless told."""
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
    """The ports that the engine takes its two from, as it reads its environment: what makes no sense is ignored."""
    texts = [os.environ.get(name) for name in _PORT_VARIABLES]
    try:
        first, last = (
            default if text is None else int(text) for text, default in zip(texts, _DEFAULT_PORTS, strict=True)
        )
    except ValueError:
        return _DEFAULT_PORTS
    return (first, last) if _LEAST_PORT <= first <= last <= _LAST_PORT else _DEFAULT_PORTS


@functools.cache
def _make_engine(host: str, device: str) -> MooncakeEngine:
    return MooncakeEngine(host, device)


def _park(memory: Registered, after_s: float) -> None:
    """Leave `memory` registered for `after_s` seconds; a thread of its own ends that."""
    timer = threading.Timer(after_s, _unpark, (memory,))
    timer.name, timer.daemon = "kv-mooncake-park", True
    with _PARKING:
        if memory in _PARKED:
            return
        _PARKED[memory] = timer
        crowded = next(iter(_PARKED)) if len(_PARKED) > _MOST_PARKED else None
    if crowded is not None:
        _unpark(crowded)
    try:
        timer.start()
    except RuntimeError:  # no thread to be had
        _unpark(memory)


def _unpark(memory: Registered) -> None:
    with _PARKING:
        timer = _PARKED.pop(memory, None)
    if timer is not None:
        timer.cancel()
    memory.take_back()
