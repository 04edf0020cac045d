"""Memory on an NPU that a child process maps too, by the calls with which torch_npu itself shares tensors.

    parent  _share_npu_             CANN's key of the allocation, our offset in it, a counter of users, an event
    child   _new_shared_npu         waits for the event on its stream, and maps the allocation
    parent  _release_ipc_counter_npu    after the child's end: a killed child does not decrement the counter, so without
                                        this call torch_npu would keep the memory forever

(torch_npu 2.13: torch_npu.multiprocessing.reductions; THNPStorage_shareNpu, THNPStorage_newSharedNpu and
THNPStorage_releaseIPCCounter of StorageSharing.cpp.) Never run on an NPU.
"""

import json
from typing import Any

import torch

from devices.shared_memory import SharedMemory

_STORAGE: Any = torch.UntypedStorage  # torch_npu adds its methods to it


def share_npu_memory(num_bytes: int, device: torch.device) -> SharedMemory:
    """Allocate memory that a child process maps once. Raises RuntimeError."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage: Any = tensor.untyped_storage()
    _, key, size, offset, counter, counter_offset, event, has_event = storage._share_npu_()
    handle = [key.hex(), size, offset, counter.hex(), counter_offset, event.hex(), has_event]
    return SharedMemory(
        tensor, json.dumps(handle), (), lambda: _STORAGE._release_ipc_counter_npu(counter, counter_offset)
    )


def map_npu_memory(handle: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the parent's memory. Raises RuntimeError."""
    key, size, offset, counter, counter_offset, event, has_event = json.loads(handle)
    storage = _STORAGE._new_shared_npu(
        device.index, bytes.fromhex(key), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event),
        has_event,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
