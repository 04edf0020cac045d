"""The backends of a group by name, in one table: where they come from, what they can do, what a link costs.

Nothing here imports torch before a function is called. gloo is what the tests run; nccl and hccl were never run by us.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_MIB = 1 << 20
_ABORT_TAG, _ABORT_BYTES = 1, 4 * _MIB  # as large as any payload: a peer could send one here
_NCCL_CHANNEL_MIB = 6.5  # P2pNcclConnector's users see about 100 MB with 16 channels, 52 MB with 8


@dataclass(frozen=True, slots=True)
class Backend:
    """How groups of one backend are made, and its rules.

    `make(store, rank, host, timeout_s, device)` and `abort(group, peer)` run on the device's issuing thread.
    `polls`: a work's `is_completed` is true to life; else only a thread inside `wait` gets to know (gloo).
    `exact`: a receive has the size of what is sent; else it may be larger, and must not be smaller: gloo calls
    std::terminate on more bytes than were asked for, whatever the peer meant by it.
    `lazy`: the first operation makes the communicator, so it belongs to the creation.
    """

    name: str
    device_type: str  # of the pools it serves
    staging: str  # where its staging memory lies
    lacking: Callable[[], str | None]
    make: Callable[[Any, int, str, float, str], Any]
    abort: Callable[[Any, int], None] | None  # None: a group that hangs can only be abandoned
    link_bytes: Callable[[Mapping[str, str]], int]
    free_bytes: Callable[[str], int | None]
    polls: bool
    exact: bool
    lazy: bool


def torch_lacking() -> str | None:
    """Why torch cannot be used here, in words, or None. Imports it."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; it comes with the extra pdserve[engine]"
    import torch.distributed

    return None if torch.distributed.is_available() else f"torch {torch.__version__} is built without torch.distributed"


def torch_version() -> str:
    """Return major.minor of torch: c10d promises nothing between versions."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])


def _gloo_lacking() -> str | None:
    import torch.distributed

    if torch.distributed.is_gloo_available():
        return None
    return f"torch {torch.__version__} is built without gloo"


def _make_gloo(store: Any, rank: int, host: str, timeout_s: float, device: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank, 2, options)


def _abort_gloo(group: Any, peer: int) -> None:
    """Close the pair: gloo's own abort does nothing, but one receive that times out ends all others (torch 2.13)."""
    import torch

    group.recv([torch.empty(_ABORT_BYTES, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def _nccl_lacking() -> str | None:
    import torch.distributed

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None if torch.distributed.is_nccl_available() else f"torch {torch.__version__} is built without nccl"


def _make_nccl(store: Any, rank: int, host: str, timeout_s: float, device: str) -> Any:
    import torch
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(torch.device(device))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, 2, options)


def _abort_nccl(group: Any, peer: int) -> None:
    group.abort()


def _nccl_link_bytes(environ: Mapping[str, str]) -> int:
    return int(_number(environ, "NCCL_MAX_NCHANNELS", 16) * _NCCL_CHANNEL_MIB * _MIB)


def _cuda_free_bytes(device: str) -> int | None:
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def _hccl_lacking() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; it comes with the extra pdserve[npu]"
    return None


def _make_hccl(store: Any, rank: int, host: str, timeout_s: float, device: str) -> Any:
    torch_npu: Any = importlib.import_module("torch_npu")
    c10d: Any = importlib.import_module("torch_npu._C._distributed_c10d")
    torch_npu.npu.set_device(device)
    options = c10d.ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return c10d.ProcessGroupHCCL(store, rank, 2, options)


def hccl_link_bytes(environ: Mapping[str, str]) -> int:
    """Two buffers: P2P_HCCL_BUFFSIZE MB (20), or the whole communicator's HCCL_BUFFSIZE (200) when that is 0."""
    size = _number(environ, "P2P_HCCL_BUFFSIZE", 20)
    return 2 * (size or _number(environ, "HCCL_BUFFSIZE", 200)) * _MIB


def _npu_free_bytes(device: str) -> int | None:
    torch_npu: Any = importlib.import_module("torch_npu")
    return int(torch_npu.npu.mem_get_info(device)[0])


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default


BACKENDS: dict[str, Backend] = {
    "gloo": Backend(
        "gloo", "cpu", "cpu", _gloo_lacking, _make_gloo, _abort_gloo, lambda _: 0, lambda _: None, polls=False,
        exact=False, lazy=False,
    ),
    "nccl": Backend(
        "nccl", "cuda", "cuda", _nccl_lacking, _make_nccl, _abort_nccl, _nccl_link_bytes, _cuda_free_bytes, polls=True,
        exact=True, lazy=True,
    ),
    "hccl": Backend(
        "hccl", "npu", "npu", _hccl_lacking, _make_hccl, None, hccl_link_bytes, _npu_free_bytes, polls=True, exact=True,
        lazy=True,
    ),
}  # fmt: skip


def backend_for(device: str) -> Backend | None:
    """Return the backend that serves pools on `device`, such as "npu:0", or None."""
    device_type = device.partition(":")[0]
    return next((backend for backend in BACKENDS.values() if backend.device_type == device_type), None)


def link_bytes(backend: Backend) -> int:
    """Bytes of device memory that one link over `backend` costs in this process."""
    return backend.link_bytes(os.environ)
