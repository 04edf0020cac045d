"""A few MB of KV over each transport, from the device to itself, to the CPU and back: byte for byte, with the rate.

Both ends are in this process, each with a pool of its own and blocks of its own size, dealt at random.
"""

import functools
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from devices.interface import Device, Memory, Traits
from kvtransfer.device_memory import device_memory
from kvtransfer.interface import SendStats
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transports import NAMES, make_transports
from pdserve.selftest.check import Check, NotHere, Wrong
from wire.errors import ConfigError, PdserveError
from wire.kv_layout import KvTensor, PoolLayout

_TENSORS = tuple(KvTensor(layer, name, 8, 64, "float16") for layer in range(4) for name in ("k", "v"))
_TOKENS = 700  # 5.7 MB, and no whole number of blocks
_DEADLINE_S = 60.0
_TWO_PROCESSES = ("cuda_ipc",)
"""A process cannot open the handle of its own memory."""
_GROUPS = "process_group"
"""One thread issues a card's operations, and both ends of a group have to be made at once."""
Bytes = npt.NDArray[np.uint8]


def link_checks(device: Device, host: Device) -> Iterator[Check]:
    """Yield a check for each transport and pair; `host` is the CPU."""
    pairs = [(device, device)]
    if not device.traits.pools_on_host:
        pairs += [(device, host), (host, device)]
    for source, target in pairs:
        for name in NAMES:
            row = f"{name}, {source.name} to {target.name}"
            yield Check("links", row, functools.partial(_send, name, source, target))


def _send(name: str, source: Device, target: Device) -> str:
    ours, theirs = _make_pool(source), _make_pool(target)
    try:
        for device, pool in ((source, ours), (target, theirs)):
            _check_usable(name, device, pool)
        _check_common(name, source.traits, target.traits)
        if name in _TWO_PROCESSES or (name == _GROUPS and source is target and not source.traits.pools_on_host):
            raise NotHere(f"it needs two processes: `pdserve verify --transport {name}` has them")
        return _hand_over(name, ours, theirs)
    finally:
        ours.close()
        theirs.close()


def _check_usable(name: str, device: Device, pool: Memory) -> None:
    try:
        make_transports((name,), pool)
    except ConfigError as error:
        raise NotHere(f"{device.name}: {str(error).removeprefix(f'--kv-transport {name}: ')}") from error


def _check_common(name: str, one: Traits, other: Traits) -> None:
    """Raise NotHere where two kinds of devices do not speak the same over this transport."""
    for transport, ours, theirs in (
        (_GROUPS, one.collective, other.collective), ("mooncake", one.one_sided, other.one_sided)
    ):  # fmt: skip
        if name == transport and ours != theirs:
            raise NotHere(f"{one.kind} speaks {ours} there and {other.kind} {theirs}")


def _make_pool(device: Device) -> Memory:
    size = device.traits.block_size
    return device.make_pool(PoolLayout(_TENSORS, num_blocks=-(-_TOKENS // size) + 5, block_size=size))


def _hand_over(name: str, ours: Memory, theirs: Memory) -> str:
    """Send the tokens twice, the second time into other blocks: the first one dialled and took scratch memory."""
    events = _Events()
    sent, sent_blocks = _fill(ours), _blocks(ours.layout, 1)
    receiver = KvReceiver(
        theirs, instance_id="selftest-to", epoch=2, host="127.0.0.1", transports=(name,), events=events
    )  # fmt: skip
    try:
        sender = KvSender(
            ours, instance_id="selftest-from", epoch=1, transports=(name,), events=events, progress_age=lambda: 0.0
        )
        try:
            for seed in (2, 3):
                blocks = _blocks(theirs.layout, seed)
                ticket = receiver.open(secrets.token_hex(16), num_tokens=_TOKENS, first_token=0, block_ids=blocks)
                sender.begin(ticket)
                for layer in range(ours.layout.num_layers):
                    sender.put(ticket.ticket_id, layer, 0, _TOKENS, sent_blocks)
                sender.commit(ticket.ticket_id, b"selftest")
                stats = events.wait()
                _compare(sent, ours.layout, sent_blocks, _bytes(theirs), theirs.layout, blocks)
        finally:
            sender.close()
    finally:
        receiver.close()
    return f"{stats.kv_bytes / 1e6:.1f} MB, {stats.kv_bytes / max(stats.seconds, 1e-9) / 1e9:.2f} GB/s"


def _compare(
    sent: Bytes, ours: PoolLayout, sent_blocks: list[int], got: Bytes, theirs: PoolLayout, blocks: list[int]
) -> None:
    for tensor in range(len(_TENSORS)):
        if not np.array_equal(_rows(got, theirs, tensor, blocks), _rows(sent, ours, tensor, sent_blocks)):
            raise Wrong(f"the bytes of tensor {tensor} are others than were sent, and no digest showed it")


class _Events:
    """Hears of one ticket after another: implements SenderEvents and ReceiverEvents."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._stats: SendStats | None = None
        self._error: str | None = None

    def wait(self) -> SendStats:
        """Return what the sender measured. Raises Wrong with what became of the ticket else."""
        if not self._done.wait(_DEADLINE_S):
            raise Wrong(f"nothing was heard of the ticket within {_DEADLINE_S:g} s")
        if self._stats is None:
            raise Wrong(self._error or "the ticket ended")
        stats, self._stats = self._stats, None
        self._done.clear()
        return stats

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """The receiver has it."""
        self._stats = stats
        self._done.set()

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """It went wrong."""
        self._error = str(error)
        self._done.set()

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """The sender is told, and tells."""

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """It ended before its commit."""
        self._error = self._error or reason
        self._done.set()


def _blocks(layout: PoolLayout, seed: int) -> list[int]:
    dealt = np.random.default_rng(seed).permutation(layout.num_blocks)
    return [int(block) for block in dealt[: layout.num_blocks_for(_TOKENS)]]


def _fill(pool: Memory) -> Bytes:
    """Write random bytes into the whole pool and return them."""
    data = np.frombuffer(np.random.default_rng(7).bytes(pool.layout.total_bytes), dtype=np.uint8)
    device = device_memory(pool)
    if device is None:
        pool.buffer[:] = data.data
    else:
        device.tensor.copy_(torch.from_numpy(data.copy()))
        written = getattr(pool, "written", None)
        if written is not None:
            written()
    return data


def _bytes(pool: Memory) -> Bytes:
    device = device_memory(pool)
    if device is None:
        return np.frombuffer(bytes(pool.buffer), dtype=np.uint8)
    return device.tensor.to("cpu", copy=True).numpy()


def _rows(data: Bytes, layout: PoolLayout, tensor: int, blocks: list[int]) -> Bytes:
    """Return one tensor's bytes of all tokens, in their order: [_TOKENS * token_bytes]."""
    size = layout.block_size * layout.tensors[tensor].token_bytes
    start = layout.offsets[tensor]
    whole = data[start : start + layout.num_blocks * size].reshape(layout.num_blocks, size)
    return whole[blocks].reshape(-1)[: _TOKENS * layout.tensors[tensor].token_bytes]
