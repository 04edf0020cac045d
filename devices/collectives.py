"""The backends of torch process groups, in one table by name: how a group is made, its rules, and a link's memory.

gloo   tensors in host memory; every test runs it
nccl   GPUs; never run by us: it takes two GPUs
hccl   NPUs; never run by us

Traits.collective names the backend of a device kind. The caller provides the store: kvtransfer/process_group/
for the two ranks of a KV link, engine/ranks/sums.py for all ranks of an instance. Torch is imported only when a
function is called.
"""

import importlib
import importlib.util
import ipaddress
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from devices.table import KINDS, find_kind, open_device
from wire.errors import ConfigError

_MIB = 1 << 20
_ABORT_TAG, _ABORT_BYTES = 1, 4 * _MIB  # as large as any payload, because a peer could send one with this tag
_NCCL_CHANNEL_MIB = 6.5  # P2pNcclConnector's users see about 100 MB with 16 channels, 52 MB with 8
_CONNECT_S = 60.0
_HCCL_MIN_CONNECT_S, _HCCL_GRACE_S = 120, 20  # HCCL_CONNECT_TIMEOUT's minimum; HCCL waits 20 s longer
_HCCL_LINK_S = _HCCL_MIN_CONNECT_S + _HCCL_GRACE_S + 20.0  # 20 s more for the start of the link's process; an estimate


@dataclass(frozen=True, slots=True)
class Collective:
    """How process groups of one backend are made, and their rules.

    `lacking` explains why the backend cannot be used here; it imports torch.
    `make(store, rank, of, host, timeout_s, device)` returns a group. `make_link`, if not None, makes a KV link's group
    instead, and that group's first operation takes `make_s` at most. `abort(group, peer)` aborts hanging operations. On
    the device, sums over ranks may wait for a link's operation, so it must be possible to abort each link alone: with
    `abort`, or by killing its `own_process`.
    `on_host`: tensors are in host memory, otherwise on the device.
    `new_stream(device)` makes a stream for issuing the links' operations; the returned function's context makes it the
    current one. Without this stream, NCCL's own would wait for the work on the thread's current stream: the engine's.
    `polls`: a work's `is_completed` is reliable, and its `wait` does not return when the peer is gone; otherwise
    only a thread inside `wait` sees the completion (gloo).
    `exact`: a receive must have the size of the send; otherwise it may be larger but not smaller: gloo calls
    std::terminate when a peer sends more bytes than the receive expects.
    `lazy`: the first operation creates the communicator, so that operation counts as part of the creation.
    `link_bytes(environ)`: device memory that a group of two uses. `free_bytes(device)`: free device memory.
    `make_s`: minimum time to allow for creating a link's communicator; an estimate for backends that we never ran. If
    it is not 0, no ticket waits for such a link where a quicker transport works.
    `connect_s(environ)`: time limit within which the ranks, once all have loaded, connect to each other.
    `own_process`: each KV link makes its group in a process of its own, started with `defaults` in its environment.
    HCCL has no abort, so that process is killed instead. HCCL also creates the communicator inside the first send, and
    torch_npu puts that send into the process's only queue, so a peer that hangs then would stop every operation of the
    process.
    `links_by_default`: KV links use this backend even if --kv-transport does not name it.
    `error_handling`: the environment variable that says what torch does when one operation fails.
    `launch_order`: the environment variable that allows only one thread to launch operations on a device.
    """

    name: str
    lacking: Callable[[], str | None]
    make: Callable[[Any, int, int, str, float, str], Any]
    abort: Callable[[Any, int], None] | None  # None: each link needs a process of its own
    on_host: bool
    polls: bool
    exact: bool
    lazy: bool
    link_bytes: Callable[[Mapping[str, str]], int]
    free_bytes: Callable[[str], int | None]
    make_link: Callable[[Any, int, int, str, float, str], Any] | None = None
    new_stream: Callable[[str], Callable[[], AbstractContextManager[object]]] = lambda _: nullcontext
    connect_s: Callable[[Mapping[str, str]], float] = lambda _: _CONNECT_S
    make_s: float = 0.0
    links_by_default: bool = False
    error_handling: str | None = None
    launch_order: str | None = None
    own_process: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)


def collective_of(device: str) -> Collective | None:
    """Return the backend for tensors on `device`, such as "npu:0"; None for an unknown kind of device."""
    kind = KINDS.get(device.partition(":")[0])
    return None if kind is None else COLLECTIVES.get(kind.traits.collective)


def setting_that_exits(collective: Collective, environ: Mapping[str, str]) -> str | None:
    """Return "NAME=VALUE" if a variable makes torch end the process when one operation fails.

    The values 0 and 2 do not: ErrorHandlingMode in torch's ProcessGroupNCCL.hpp and torch_npu's ProcessGroupHCCL.hpp.
    """
    name = collective.error_handling
    value = "" if name is None else environ.get(name, "").strip()
    return f"{name}={value}" if value.isdecimal() and int(value) not in (0, 2) else None


def setting_of_launch_order(collective: Collective, environ: Mapping[str, str]) -> str | None:
    """Return "NAME=VALUE" if a variable makes launches by two threads an error.

    NCCL's NCCL_LAUNCH_RACE_FATAL (misc/strongstream.cc): all devices must get the launches in the same order.
    """
    name = collective.launch_order
    value = "" if name is None else environ.get(name, "").strip()
    return f"{name}={value}" if value.isdecimal() and int(value) else None


def collective_named(name: str) -> Collective:
    """Return the backend of this name. Raises ConfigError."""
    found = COLLECTIVES.get(name)
    if found is None:
        raise ConfigError(f"process group backend {name!r} is not one of {', '.join(COLLECTIVES)}")
    return found


def torch_version() -> str:
    """Return torch's major.minor: c10d guarantees no compatibility between versions."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])


def _torch_lacking() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; it comes with the extra pdserve[engine]"
    import torch.distributed

    return None if torch.distributed.is_available() else f"torch {torch.__version__} is built without torch.distributed"


def _gloo_lacking() -> str | None:
    lacking = _torch_lacking()
    if lacking is not None:
        return lacking
    import torch.distributed

    if torch.distributed.is_gloo_available():
        return None
    return f"torch {torch.__version__} is built without gloo"


def _make_gloo(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank, of, options)


def _abort_gloo(group: Any, peer: int) -> None:
    """Let a receive time out: that makes all other operations fail (torch 2.13). gloo's own abort does nothing."""
    import torch

    group.recv([torch.empty(_ABORT_BYTES, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def _nccl_lacking() -> str | None:
    lacking = _torch_lacking() or find_kind("cuda").lacking()
    if lacking is not None:
        return lacking
    import torch.distributed

    return None if torch.distributed.is_nccl_available() else f"torch {torch.__version__} is built without nccl"


_NCCL_LINK_S = 15.0  # an estimate: the first communicator of two hosts also finds and opens their network cards
NCCL_DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # not 3: then torch would exit the process when one operation fails
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # not 1: a thread of torch would query the store every second
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # not 1: then torch would exit the process when a thread of its own hangs
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # not 15,000: a failed operation blocks its group for four times this
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{_NCCL_LINK_S - 1:.0f}",  # seconds, not 1,800; torch waits one second longer
    "NCCL_GRAPH_REGISTER": "0",  # not 1: ranks would wait for each other in a capture, even for one that failed
    "NCCL_MAX_P2P_NCHANNELS": "8",  # not 64: each channel of a link takes a multiprocessor while a frame is moved
}
"""Defaults of the environment variables that torch and NCCL read: docs/devices.md."""


def set_nccl_defaults(environ: MutableMapping[str, str], host: str) -> None:
    """Set the variables that the user has not set, for a group whose ranks connect at `host`."""
    for name, value in NCCL_DEFAULTS.items():
        environ.setdefault(name, value)
    if ipaddress.ip_address(host).is_loopback:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host: listen on no other interface


def _make_nccl(
    store: Any, rank: int, of: int, host: str, timeout_s: float, device: str, *, blocking: bool = True
) -> Any:
    """Keep torch's timeout of ten minutes: callers have deadlines, and a torch timeout makes a hung send look done.

    The first operation creates the communicator. Unless the group is `blocking`, torch gives up after
    TORCH_NCCL_NONBLOCKING_TIMEOUT, which it reads once per process (NCCLUtils.cpp: NCCLComm::waitReady; the launch of
    each operation: C10D_NCCL_CHECK_TIMEOUT_GROUPEND). Groups of ranks are blocking: connecting may take them longer.
    """
    from torch.distributed import ProcessGroupNCCL

    set_nccl_defaults(os.environ, host)
    open_device(device).activate()
    options = ProcessGroupNCCL.Options()
    if not blocking:
        options.config.blocking = 0
        options.is_high_priority_stream = True  # from torch's second pool of streams: sums and the engine never use it
    return ProcessGroupNCCL(store, rank, of, options)


def _abort_nccl(group: Any, peer: int) -> None:
    group.abort()


def _nccl_link_bytes(environ: Mapping[str, str]) -> int:
    """Return the size of the channels of point-to-point operations (NCCL's ncclTopoComputeP2pChannels)."""
    maximum = _number(environ, "NCCL_MAX_P2P_NCHANNELS", int(NCCL_DEFAULTS["NCCL_MAX_P2P_NCHANNELS"]))
    return int(min(maximum, _number(environ, "NCCL_MAX_NCHANNELS", 16)) * _NCCL_CHANNEL_MIB * _MIB)


def _hccl_lacking() -> str | None:
    return _torch_lacking() or find_kind("npu").lacking()


HCCL_DEFAULTS: Mapping[str, str] = {
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",  # not 1: then torch_npu would exit the process when one operation fails
    "TORCH_HCCL_DUMP_ON_TIMEOUT": "0",  # with 1 a failed operation would block its group for ten minutes
    "TORCH_HCCL_ENABLE_MONITORING": "0",  # with 1 torch_npu exits the process when a thread of its own hangs
    "P2P_HCCL_BUFFSIZE": "20",  # MB: each send/receive communicator has two buffers of this size
    "HCCL_CONNECT_TIMEOUT": "120",  # seconds; HCCL's minimum
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",  # not 60000-60031 and 16666, which several processes of an NPU would bind
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",  # the same; it must be set on both ends
    "HCCL_EXEC_TIMEOUT": "204",  # seconds, not 1,836: until then the memory for a lost peer stays allocated
}
"""Defaults of the variables that HCCL and torch_npu read: docs/devices.md. network.py sets HCCL's network interface."""


def set_hccl_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in HCCL_DEFAULTS.items():
        environ.setdefault(name, value)


def _make_hccl(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> Any:
    """Keep torch_npu's timeout, half an hour: callers have deadlines, and its timeout makes a hung send look done."""
    set_hccl_defaults(os.environ)
    open_device(device).activate()
    c10d: Any = importlib.import_module("torch_npu._C._distributed_c10d")
    return c10d.ProcessGroupHCCL(store, rank, of, c10d.ProcessGroupHCCL.Options())


def _hccl_link_bytes(environ: Mapping[str, str]) -> int:
    """Return the size of two buffers of P2P_HCCL_BUFFSIZE MB (default 20), or of HCCL_BUFFSIZE (200) if that is 0."""
    size = _number(environ, "P2P_HCCL_BUFFSIZE", 20)
    return 2 * (size or _number(environ, "HCCL_BUFFSIZE", 200)) * _MIB


def _hccl_connect_s(environ: Mapping[str, str]) -> float:
    requested = _number(environ, "HCCL_CONNECT_TIMEOUT", _HCCL_MIN_CONNECT_S)
    return float(max(requested, _HCCL_MIN_CONNECT_S) + _HCCL_GRACE_S + _CONNECT_S)


def _free_bytes(device: str) -> int:
    return open_device(device).memory().free


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default


COLLECTIVES: dict[str, Collective] = {
    "gloo": Collective(
        "gloo", _gloo_lacking, _make_gloo, _abort_gloo, on_host=True, polls=False, exact=False, lazy=False,
        link_bytes=lambda _: 0, free_bytes=lambda _: None,
    ),
    "nccl": Collective(
        "nccl", _nccl_lacking, _make_nccl, _abort_nccl, on_host=False, polls=True, exact=True, lazy=True,
        link_bytes=_nccl_link_bytes, free_bytes=_free_bytes, make_link=partial(_make_nccl, blocking=False),
        new_stream=lambda device: open_device(device).new_stream(),
        make_s=_NCCL_LINK_S, links_by_default=True, error_handling="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        launch_order="NCCL_LAUNCH_ORDER_IMPLICIT",
    ),
    "hccl": Collective(
        "hccl", _hccl_lacking, _make_hccl, None, on_host=False, polls=True, exact=True, lazy=True,
        link_bytes=_hccl_link_bytes, free_bytes=_free_bytes, connect_s=_hccl_connect_s, make_s=_HCCL_LINK_S,
        links_by_default=True, error_handling="TORCH_HCCL_ASYNC_ERROR_HANDLING", own_process=True,
        defaults=HCCL_DEFAULTS,
    ),
}  # fmt: skip
