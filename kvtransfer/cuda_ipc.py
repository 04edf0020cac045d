"""CUDA IPC transport: the sender lends its pool's allocation, the receiver opens it and copies on the device.

    Unix socket, abstract name | HELLO, WELCOME | SETUP with the handles | READY, FRAME headers with blocks

Unlike a sealed memfd an opened allocation can be written: that the receiver only reads is its own promise, which the
driver does not enforce. An allocation is opened whole, with all that lies in it besides the pool. So a link is made
only between processes of one user (as on every Unix socket here), which have proven the cluster's secret where there is
one: without a secret the same user is enough.

The sender's KV is complete before a frame is announced: its link's thread waits for the mark of what it announces, with
an event that the receiver's stream waits for too. There is one event a link, so a frame announced before its mark was
reached would have the receiver wait for those of later frames.
The calls of the driver stand behind IpcDriver (cuda_handles.py; cuda_driver.py has the real ones, never run by us).
"""

import contextlib

from kvtransfer import shm
from kvtransfer.cuda_handles import IpcDriver, LentEvent, MappedPool, decode_lent, encode_lent
from kvtransfer.device_memory import DeviceMemory, DeviceRegion, device_memory
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.frame import Frame, MessageType, Taken
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.named_windows import WindowNamer, WindowNames
from kvtransfer.slots import SlotMap
from kvtransfer.stream import READ_AHEAD_BYTES, LinkLost, Stream, expect
from kvtransfer.transport import FRAME_BYTES, Timeouts
from wire.errors import Unavailable
from wire.kv_transports import ELSEWHERE
from wire.types import KvEndpoint


class CudaIpcTransport:
    """Implements transport.Transport over Unix sockets, between CUDA pools of one host; imports torch when asked."""

    name = "cuda_ipc"
    over_unix = True
    lanes = 1

    def __init__(self, memory: PoolMemory, driver: IpcDriver | None = None) -> None:
        self._memory, self._driver = device_memory(memory), driver
        self._host_id = shm.host_id()

    def unusable(self) -> str | None:
        """It needs a pool in the memory of a CUDA device, torch, and an allocation that can be lent."""
        if self._memory is None:
            return "the KV pool is host memory"
        try:
            return self._of_process().lacking(self._memory.tensor)
        except ImportError as error:
            return f"torch cannot be imported ({error}); it comes with the extra pdserve[cuda]"

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Only this host and this network namespace are within reach; the device is compared when the link is made."""
        return None if endpoint.host_id == self._host_id else ELSEWHERE

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to the abstract name."""
        return shm.connect(endpoint.address, timeouts)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "CudaIpcOutlet":
        """Lend the pool. Raises OSError when the driver does not."""
        memory, driver = self._memory, self._of_process()
        assert memory is not None, "an unusable transport is not offered"
        event = driver.lend_event(memory.device)
        stream.send([encode_lent(driver.lend(memory.tensor, event))])
        return CudaIpcOutlet(memory, event, timeouts.progress_s)

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "CudaIpcInlet":
        """Open the sender's pool. Raises Unavailable with both values."""
        lent = decode_lent(expect(stream, MessageType.SETUP, timeout_s=timeouts.progress_s))
        driver, layout = self._of_process(), hello.layout
        if lent.num_bytes != layout.total_bytes:
            raise Unavailable(
                f"the pool of {hello.sender_id} has {lent.num_bytes} bytes, its layout {layout.total_bytes}"
            )
        if not driver.knows(lent.device_uuid):
            raise Unavailable(
                f"the pool of {hello.sender_id} lies on device {lent.device_uuid.hex()}, which is not seen here"
            )
        stream.read_ahead(READ_AHEAD_BYTES)
        try:
            opened = driver.open(lent)
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} cannot be opened: {error}") from error
        return CudaIpcInlet(opened, hello)

    def _of_process(self) -> IpcDriver:
        if self._driver is None:
            from kvtransfer.cuda_driver import CudaDriver

            self._driver = CudaDriver()
        return self._driver


class CudaIpcOutlet:
    """The sender's side of one connection: owner of the event that says that the KV announced is complete."""

    most_frame_bytes = FRAME_BYTES

    def __init__(self, memory: DeviceMemory, event: LentEvent, progress_s: float) -> None:
        """The event may take `progress_s` to be reached."""
        self._memory, self._event, self._progress_s, self._namer = memory, event, progress_s, WindowNamer()

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """The header alone, which names the blocks, once the kernels that filled them are done."""
        region = source.region
        ready = region.ready if isinstance(region, DeviceRegion) else None
        try:
            self._event.record(ready or self._memory.ready, self._progress_s)
        except OSError as error:
            raise LinkLost(f"the KV of frame {frame.number} cannot be awaited: {error}") from error
        return [self._namer.encode(frame)]

    def taken(self, message: Taken) -> None:
        """Nothing is lent but the pool."""

    def close(self) -> None:
        """The driver has no way to take the pool back: the receiver unmaps it when it sees the link's end."""


class CudaIpcInlet:
    """The receiver's side of one connection: owner of the mapping of the sender's pool."""

    def __init__(self, opened: MappedPool, hello: Hello) -> None:
        self._opened, self._digests = opened, hello.digests
        region = DeviceRegion(opened.tensor, readonly=True, ready=opened.wait_event)
        self._slots: SlotMap | None = SlotMap(hello.layout, region)
        self._names = WindowNames(hello.layout.block_size)

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Copy from the sender's blocks to the target, digesting on the way; ends when the copy has."""
        assert self._slots is not None, "closed by the thread that moves"
        return shm.move_blocks(self._slots, self._names, frame, target, stop, digests=self._digests)

    def skip(self, frame: Frame) -> None:
        """Nothing of a frame is in the stream but its header, which may name blocks for later ones."""
        shm.skip_blocks(self._names, frame)

    def close(self) -> None:
        """Unmap the pool; no move is under way, for a move has ended when it returns."""
        self._slots = None
        with contextlib.suppress(OSError):  # the process that lent it may be gone already
            self._opened.close()
