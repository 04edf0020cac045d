"""CUDA IPC transport: the sender exports its pool's allocation, the receiver opens it and copies on the device.

    Unix socket, abstract name | HELLO, WELCOME | SETUP with the handles | READY, FRAME headers with blocks

Unlike a sealed memfd, an opened allocation is writable: the driver does not enforce that the receiver only reads. An
allocation is opened whole, including whatever it contains besides the pool. So links are made only between processes
of one user (as on every Unix socket here) that have proven that they hold the cluster secret; without a secret, running
as the same user is enough.

The sender's KV is complete before a frame is announced: the link's thread has waited for its mark. The receiver opens
the allocation on its own device, as NCCL does, so the sender's device may be invisible to it (CUDA_VISIBLE_DEVICES):
each rank sees only its own. IpcDriver (cuda_handles.py) abstracts the driver's calls; cuda_driver.py, which we have
never run, makes them.
"""

import contextlib

from kvtransfer import shm
from kvtransfer.cuda_handles import IpcDriver, MappedPool, decode_handles, encode_handles
from kvtransfer.device_memory import DeviceRegion, device_memory
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.link_messages import Frame, MessageType
from kvtransfer.named_windows import WindowNames
from kvtransfer.slots import SlotMap
from kvtransfer.stream import READ_AHEAD_BYTES, Stream, expect
from kvtransfer.transport_interface import FRAME_BYTES, Timeouts, TransportTraits
from wire.errors import Unavailable
from wire.link_reasons import ELSEWHERE
from wire.types import KvEndpoint


class CudaIpcTransport:
    """Implements transport.Transport over Unix sockets, between CUDA pools of one host; imports torch on use."""

    traits = TransportTraits(
        "cuda_ipc", one_host=True, reads_pool=True,
        two_processes=True,  # a process cannot open a handle of its own memory
        purpose="moves KV between the GPUs of a host",
    )  # fmt: skip

    def __init__(self, memory: PoolMemory, driver: IpcDriver | None = None) -> None:
        self._memory, self._driver = device_memory(memory), driver
        self._host_id = shm.host_id()

    def unusable(self) -> str | None:
        """It needs a pool in CUDA memory, torch, and an allocation that can be exported."""
        if self._memory is None:
            return "the KV pool is host memory"
        try:
            return self._of_process().lacking(self._memory.tensor)
        except ImportError as error:
            return f"torch cannot be imported ({error}); it comes with the extra pdserve[cuda]"

    def bind(self, host: str | None, source: str | None) -> None:
        """Do nothing: a Unix socket has no address."""

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Only this host and network namespace can be reached; the device is checked when the link is made."""
        return None if endpoint.host_id == self._host_id else ELSEWHERE

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to the abstract socket name."""
        return shm.connect(endpoint.address, timeouts)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> shm.ShmOutlet:
        """Export the pool. This cannot be revoked: the receiver unmaps the pool at the link's end. Raises OSError."""
        assert self._memory is not None, "an unusable transport is not offered"
        stream.send([encode_handles(self._of_process().export(self._memory.tensor))])
        return shm.ShmOutlet(FRAME_BYTES)

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "CudaIpcInlet":
        """Open the sender's pool. Raises Unavailable with the values that differ."""
        handles = decode_handles(expect(stream, MessageType.SETUP, timeout_s=timeouts.progress_s))
        assert self._memory is not None, "an unusable transport is not offered"
        layout = hello.layout
        if handles.num_bytes != layout.total_bytes:
            raise Unavailable(
                f"the pool of {hello.sender_id} has {handles.num_bytes} bytes, but its layout has {layout.total_bytes}"
            )
        stream.read_ahead(READ_AHEAD_BYTES)
        try:
            opened = self._of_process().open(handles, self._memory.device)
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} cannot be opened: {error}") from error
        return CudaIpcInlet(opened, hello)

    def _of_process(self) -> IpcDriver:
        if self._driver is None:
            from kvtransfer.cuda_driver import CudaDriver

            self._driver = CudaDriver()
        return self._driver


class CudaIpcInlet:
    """The receiver's side of one connection: owner of the mapping of the sender's pool."""

    def __init__(self, opened: MappedPool, hello: Hello) -> None:
        self._opened, self._digests = opened, hello.digests
        region = DeviceRegion(opened.tensor, readonly=True)
        self._slots: SlotMap | None = SlotMap(hello.layout, region)
        self._names = WindowNames(hello.layout.block_size)

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Copy from the sender's blocks to the target, with digests if the link has them; complete on return."""
        assert self._slots is not None, "close() runs on the thread that moves"
        return shm.move_blocks(self._slots, self._names, frame, target, stop, digests=self._digests)

    def skip(self, frame: Frame) -> None:
        """Record the header's block ids, which later frames may refer to; the stream carries no payload to skip."""
        shm.skip_blocks(self._names, frame)

    def close(self) -> None:
        """Unmap the pool; no move is in progress, because a move has completed when it returns."""
        self._slots = None
        with contextlib.suppress(OSError):  # the process that exported it may have exited
            self._opened.close()
