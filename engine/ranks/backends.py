"""By which process group of torch ranks add up, by the type of their device: one table.

cpu | gloo   every test runs it
cuda| nccl   never run by us: no machine with two GPUs was at hand
npu | hccl   never run by us

Groups are made over a store that lies in a memfd of rank 0's: no port to meet at, no file to leave behind.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from wire.errors import ConfigError
from wire.kv_layout import Rank

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class GroupBackend:
    """How groups of one backend are made, and what holds for them.

    `lacking` says in words why there is none here. `make(store, rank, timeout_s, device)` returns a process group.
    `is_lazy`: the first sum makes the communicator. `polls`: a sum's wait does not end by itself when a peer is gone,
    and `is_completed` is true to life. `meet_s`: within that the ranks, which have all loaded, find each other.
    """

    name: str
    lacking: Callable[[], str | None]
    make: Callable[[Any, Rank, float, str], Any]
    is_lazy: bool
    polls: bool
    meet_s: float = 60.0


def backend_for(device: str, table: "Mapping[str, GroupBackend] | None" = None) -> GroupBackend:
    """Return the backend for ranks on `device`, such as "cpu" or "npu:0". Raises ConfigError where it is not here."""
    backends = BACKENDS if table is None else table
    backend = backends.get(device.partition(":")[0])
    if backend is None:
        raise ConfigError(f"ranks cannot run on {device}: only on {', '.join(backends)}")
    lacking = backend.lacking()
    if lacking is not None:
        raise ConfigError(f"ranks on {device} add up by {backend.name}, and {lacking}: use --tensor-parallel-size 1")
    return backend


def backend_named(name: str) -> GroupBackend:
    """Return the backend of this name. Raises ConfigError."""
    for backend in BACKENDS.values():
        if backend.name == name:
            return backend
    raise ConfigError(f"no way to add up over ranks is called {name!r}")


def _gloo_lacking() -> str | None:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return None
    return f"torch {torch.__version__} is built without gloo"


def _make_gloo(store: Any, rank: Rank, timeout_s: float, device: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank.number, rank.of, options)


def _nccl_lacking() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without nccl"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _make_nccl(store: Any, rank: Rank, timeout_s: float, device: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host: no listener on its other addresses
    torch.cuda.set_device(torch.device(device))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank.number, rank.of, options)


def _hccl_lacking() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; it comes with the extra pdserve[npu]"
    return None


def _make_hccl(store: Any, rank: Rank, timeout_s: float, device: str) -> Any:
    torch_npu: Any = importlib.import_module("torch_npu")
    c10d: Any = importlib.import_module("torch_npu._C._distributed_c10d")
    torch_npu.npu.set_device(device)
    options = c10d.ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return c10d.ProcessGroupHCCL(store, rank.number, rank.of, options)


BACKENDS: dict[str, GroupBackend] = {
    "cpu": GroupBackend("gloo", _gloo_lacking, _make_gloo, is_lazy=False, polls=False),
    "cuda": GroupBackend("nccl", _nccl_lacking, _make_nccl, is_lazy=True, polls=True),
    # HCCL waits for a peer for 120 s at least, and 20 more (HCCL_CONNECT_TIMEOUT)
    "npu": GroupBackend("hccl", _hccl_lacking, _make_hccl, is_lazy=True, polls=True, meet_s=180.0),
}
