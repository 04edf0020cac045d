"""The process groups of torch by name, in one table: where they come from, what holds for them, what a link costs.

gloo   tensors in host memory; every test runs it
nccl   GPUs; never run by us: no machine with one was at hand
hccl   NPUs; never run by us

Traits.collective names a kind's own. A group is made over a store that is given: by the two ranks of a KV link
(kvtransfer/process_group/), or by all ranks of an instance (engine/ranks/sums.py). Nothing here imports torch before a
function is called.
"""

import importlib
import importlib.util
import ipaddress
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from devices.table import KINDS, find_kind, open_device
from wire.errors import ConfigError

_MIB = 1 << 20
_ABORT_TAG, _ABORT_BYTES = 1, 4 * _MIB  # as large as any payload: a peer could send one here
_NCCL_CHANNEL_MIB = 6.5  # P2pNcclConnector's users see about 100 MB with 16 channels, 52 MB with 8
_MEET_S = 60.0
_HCCL_LEAST_CONNECT_S, _HCCL_GRACE_S = 120, 20  # its own limits of HCCL_CONNECT_TIMEOUT; it waits 20 s longer


@dataclass(frozen=True, slots=True)
class Collective:
    """How process groups of one kind are made, and their rules.

    `lacking` says in words why there is none here; it imports torch. `make(store, rank, of, host, timeout_s, device)`
    returns a group; it and `abort(group, peer)`, which ends what hangs, run where the group's operations are issued.
    `on_host`: it takes tensors in host memory; else those of its device.
    `polls`: a work's `is_completed` is true to life, and its wait does not end by itself when a peer is gone; else only
    a thread inside `wait` gets to know (gloo).
    `exact`: a receive has the size of what is sent; else it may be larger, and must not be smaller: gloo calls
    std::terminate on more bytes than were asked for, whatever the peer meant by it.
    `lazy`: the first operation makes the communicator, so it belongs to the creation.
    `link_bytes(environ)`: device memory that a group of two takes. `free_bytes(device)`: what there is of it.
    `make_s`: that long at least a link's communicator may take; a guess where it was never run.
    `meet_s(environ)`: within that, ranks which have all loaded find each other.
    `one_order`: what several groups issue on a device has to be in one order on all ranks, or by one thread: sums over
    the ranks and links of KV, which know nothing of each other, cannot both go by it.
    """

    name: str
    lacking: Callable[[], str | None]
    make: Callable[[Any, int, int, str, float, str], Any]
    abort: Callable[[Any, int], None] | None  # None: a group that hangs can only be abandoned
    on_host: bool
    polls: bool
    exact: bool
    lazy: bool
    link_bytes: Callable[[Mapping[str, str]], int]
    free_bytes: Callable[[str], int | None]
    meet_s: Callable[[Mapping[str, str]], float] = lambda _: _MEET_S
    make_s: float = 0.0
    one_order: bool = False


def collective_of(device: str) -> Collective | None:
    """Return what makes groups for tensors on `device`, such as "npu:0"; None for a device that nobody knows."""
    kind = KINDS.get(device.partition(":")[0])
    return None if kind is None else COLLECTIVES.get(kind.traits.collective)


def collective_named(name: str) -> Collective:
    """Return the one of this name. Raises ConfigError."""
    found = COLLECTIVES.get(name)
    if found is None:
        raise ConfigError(f"process groups are made by {', '.join(COLLECTIVES)}, and by nothing called {name!r}")
    return found


def torch_version() -> str:
    """Return major.minor of torch: c10d promises nothing between versions."""
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
    """Close the pair: gloo's own abort does nothing, but one receive that times out ends all others (torch 2.13)."""
    import torch

    group.recv([torch.empty(_ABORT_BYTES, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def _nccl_lacking() -> str | None:
    lacking = _torch_lacking() or find_kind("cuda").lacking()
    if lacking is not None:
        return lacking
    import torch.distributed

    return None if torch.distributed.is_nccl_available() else f"torch {torch.__version__} is built without nccl"


NCCL_DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # not 3, with which torch ends the process where one operation failed
}
"""What torch reads of the environment for NCCL, where the user has not said it: docs/devices.md."""


def set_nccl_defaults(environ: MutableMapping[str, str], host: str) -> None:
    """Set what the user has not, for a group whose ranks meet at `host`."""
    for name, value in NCCL_DEFAULTS.items():
        environ.setdefault(name, value)
    if ipaddress.ip_address(host).is_loopback:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host: no listener on others


def _make_nccl(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> Any:
    """Leave torch its ten minutes: who waits has a deadline, and one of torch's would make what hangs look done."""
    from torch.distributed import ProcessGroupNCCL

    set_nccl_defaults(os.environ, host)
    open_device(device).activate()
    return ProcessGroupNCCL(store, rank, of, ProcessGroupNCCL.Options())


def _abort_nccl(group: Any, peer: int) -> None:
    group.abort()


def _nccl_link_bytes(environ: Mapping[str, str]) -> int:
    return int(_number(environ, "NCCL_MAX_NCHANNELS", 16) * _NCCL_CHANNEL_MIB * _MIB)


def _hccl_lacking() -> str | None:
    return _torch_lacking() or find_kind("npu").lacking()


HCCL_DEFAULTS: Mapping[str, str] = {
    "P2P_HCCL_BUFFSIZE": "20",  # MB: sends and receives get a communicator of their own, with two buffers of this size
    "HCCL_CONNECT_TIMEOUT": "120",  # seconds; it takes no less
    "HCCL_EXEC_TIMEOUT": "204",  # seconds, not 1,836: so long a peer that is gone keeps memory of a device
}
"""What HCCL reads of the environment, where the user has not said it: docs/devices.md. Its interface: network.py."""


def set_hccl_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not."""
    for name, value in HCCL_DEFAULTS.items():
        environ.setdefault(name, value)


def _make_hccl(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> Any:
    """Leave torch_npu its half hour beyond HCCL_EXEC_TIMEOUT: its watchdog ends the process at a time of ours."""
    set_hccl_defaults(os.environ)
    open_device(device).activate()
    c10d: Any = importlib.import_module("torch_npu._C._distributed_c10d")
    return c10d.ProcessGroupHCCL(store, rank, of, c10d.ProcessGroupHCCL.Options())


def _hccl_link_bytes(environ: Mapping[str, str]) -> int:
    """Two buffers: P2P_HCCL_BUFFSIZE MB (20), or the whole communicator's HCCL_BUFFSIZE (200) when that is 0."""
    size = _number(environ, "P2P_HCCL_BUFFSIZE", 20)
    return 2 * (size or _number(environ, "HCCL_BUFFSIZE", 200)) * _MIB


def _hccl_meet_s(environ: Mapping[str, str]) -> float:
    asked = _number(environ, "HCCL_CONNECT_TIMEOUT", _HCCL_LEAST_CONNECT_S)
    return float(max(asked, _HCCL_LEAST_CONNECT_S) + _HCCL_GRACE_S + _MEET_S)


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
        link_bytes=_nccl_link_bytes, free_bytes=_free_bytes, make_s=5.0, one_order=True,
    ),
    "hccl": Collective(
        "hccl", _hccl_lacking, _make_hccl, None, on_host=False, polls=True, exact=True, lazy=True,
        link_bytes=_hccl_link_bytes, free_bytes=_free_bytes, meet_s=_hccl_meet_s, make_s=10.0, one_order=True,
    ),
}  # fmt: skip
