"""Two instances of several ranks each in one process, over real sockets, and the whole model's KV as the truth.

With `far` all ranks but the first are reached over a Unix socket, as those on devices are.
"""

import random
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtransfer.all_ranks import RanksReceiver, RanksSender, make_receiver, make_sender
from kvtransfer.far_rank import FarRank
from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.quorum import Quorum
from kvtransfer.rank_ends import RankReceiver, RankSender
from kvtransfer.rank_settings import RankTransferSettings
from kvtransfer.rank_transfer import RankTransfer
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from processes.failpoints import Failpoints
from processes.rank_payloads import to_json
from security.trust import Trust
from tests.kvtransfer.rig import DEADLINE_S, Clock, Pool, Recorder
from wire.errors import InstanceLost
from wire.kv_layout import KvTensor, PoolLayout, Rank
from wire.types import Ticket

_HALF = """
import sys, socket
from kvtransfer.rank_transfer import RankTransfer
from kvtransfer.rank_settings import RankTransferSettings
from processes.rank_payloads import from_json
from tests.kvtransfer.rank_rig import tensors
from tests.kvtransfer.rig import Pool
from wire.kv_layout import PoolLayout, Rank

fd, heads, num_blocks, block_size, number, of = map(int, sys.argv[1:7])
pool = Pool(PoolLayout(tensors(heads), num_blocks=num_blocks, block_size=block_size, rank=Rank(number, of)))
half = RankTransfer(pool, from_json(RankTransferSettings, sys.argv[7].encode()), socket.socket(fileno=fd), lambda: 0.0)
sys.stdin.read()
"""

Kv = list[list[list[bytes]]]
"""The bytes of [tensor][token][head]."""


def tensors(heads: int) -> tuple[KvTensor, ...]:
    """Layers that differ: k and v, one latent tensor, none, and k alone of another type."""
    return (
        KvTensor(0, "k", heads, 16, "float32"), KvTensor(0, "v", heads, 16, "float32"),
        KvTensor(1, "latent", 1, 36, "bfloat16"), KvTensor(3, "k", heads, 6, "bfloat16"),
    )  # fmt: skip


def held(heads: int, rank: int, ranks: int) -> list[int]:
    """The heads of a rank, assigned by hand: the first ranks take one more; too few heads are repeated."""
    if ranks > heads:
        return [rank * heads // ranks]
    sizes = [len(range(rank, heads, ranks)) for rank in range(ranks)]
    return list(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))


def cells(pool: Pool, block_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, int, int, slice]]:
    """Yield (tensor, token, head, address) of all that a rank's pool holds of these tokens."""
    layout, start = pool.layout, 0
    for number, spec in enumerate(layout.model_tensors):
        heads = held(spec.heads, layout.rank.number, layout.rank.of)
        size = spec.head_dim * (4 if spec.dtype == "float32" else 2)
        for token in range(num_tokens):
            slot = block_ids[token // layout.block_size] * layout.block_size + token % layout.block_size
            for at, head in enumerate(heads):
                offset = start + (slot * len(heads) + at) * size
                yield number, token, head, slice(offset, offset + size)
        num_bytes = layout.num_blocks * layout.block_size * len(heads) * size
        start += -(-num_bytes // 4096) * 4096


def random_kv(model: Sequence[KvTensor], num_tokens: int, seed: int = 0) -> Kv:
    source = random.Random(seed)
    sizes = [(one.heads, one.head_dim * (4 if one.dtype == "float32" else 2)) for one in model]
    return [[[source.randbytes(size) for _ in range(heads)] for _ in range(num_tokens)] for heads, size in sizes]


class RankRig:
    """P of `p_ranks` and D of `d_ranks`, over one transport."""

    def __init__(
        self, transport: str, *, p_ranks: int, d_ranks: int, heads: int = 4, p_block: int = 16, d_block: int = 16,
        num_slots: int = 512, failpoints: str = "", lease_s: float = 30.0, digests: bool = True, far: bool = False,
        processes: bool = False,
    ) -> None:  # fmt: skip
        self._transport, self._lease_s, self._digests = transport, lease_s, digests
        self._processes = processes
        self.transfers: list[RankTransfer] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.far: list[FarRank] = []
        self.lost: list[str] = []
        self.tensors, self.clock, self.events, points = (
            tensors(heads),
            Clock(),
            Recorder(),
            Failpoints.parse(failpoints),
        )
        self.progress_age = 0.0
        self.p_pools, self.d_pools = (
            [
                Pool(PoolLayout(self.tensors, num_blocks=num_slots // size, block_size=size, rank=Rank(rank, ranks)))
                for rank in range(ranks)
            ]
            for size, ranks in ((p_block, p_ranks), (d_block, d_ranks))
        )
        self.receivers: list[KvReceiver] = []
        self.senders: list[KvSender] = []

        def receive(memory: PoolMemory, quorum: Quorum) -> RankReceiver:
            if far and memory.layout.rank.number:
                return self._connect_rank(memory, "decode-0", 77).receiver(quorum)
            made = KvReceiver(
                memory, instance_id="decode-0", epoch=77, host="127.0.0.1", failpoints=points, lease_s=lease_s,
                transports=(transport,), quorum=quorum, clock=self.clock, digests=digests,
            )  # fmt: skip
            self.receivers.append(made)
            return made

        def send(memory: PoolMemory, events: SenderEvents) -> RankSender:
            if far and memory.layout.rank.number:
                return self._connect_rank(memory, "prefill-0", 55).sender(events)
            made = KvSender(
                memory, instance_id="prefill-0", epoch=55, transports=(transport,), events=events, clock=self.clock,
                progress_age=lambda: self.progress_age, failpoints=points, check_interval_s=0.05, digests=digests,
            )  # fmt: skip
            self.senders.append(made)
            return made

        receiver = make_receiver(self.d_pools, self.events, points, receive)
        sender = make_sender(self.p_pools, self.events, send)
        assert isinstance(receiver, RanksReceiver)
        assert isinstance(sender, RanksSender | KvSender)
        assert isinstance(sender, RanksSender) == (p_ranks > 1)
        self.receiver, self.sender = receiver, sender

    def _connect_rank(self, memory: PoolMemory, instance_id: str, epoch: int) -> FarRank:
        ours, theirs = socket.socketpair()
        settings = RankTransferSettings(
            instance_id, epoch, "127.0.0.1", None, (self._transport,), self._lease_s, None, self._digests, 2, 10.0
        )  # fmt: skip

        def lost(what: str) -> InstanceLost:
            self.lost.append(what)
            return InstanceLost(what)

        if self._processes:
            self.processes.append(start_half(memory.layout, settings, theirs))
        else:
            self.transfers.append(RankTransfer(memory, settings, theirs, lambda: self.progress_age))
        self.far.append(FarRank(ours, memory.layout.rank, lost, Trust()))
        self.far[-1].start(3 * DEADLINE_S)  # a process has to be started
        return self.far[-1]

    def fill(self, kv: Kv, block_ids: Sequence[int]) -> None:
        """Write each rank's heads into its pool."""
        for pool in self.p_pools:
            for tensor, token, head, where in cells(pool, block_ids, len(kv[0])):
                pool.buffer[where] = kv[tensor][token][head]

    def check(self, kv: Kv, block_ids: Sequence[int], first_token: int = 0) -> None:
        """Assert that each rank of D has its heads of every token, each at its place."""
        for pool in self.d_pools:
            for tensor, token, head, where in cells(pool, block_ids, len(kv[0])):
                if token >= first_token:
                    found = bytes(pool.buffer[where])
                    assert found == kv[tensor][token][head], f"{pool.layout.rank}: {tensor=} {token=} {head=}"

    def open(self, num_tokens: int, block_ids: Sequence[int], first_token: int = 0) -> Ticket:
        return self.receiver.open(
            secrets.token_hex(16), num_tokens=num_tokens, first_token=first_token, block_ids=block_ids
        )

    def hand_over(self, ticket: Ticket, block_ids: Sequence[int], chunk: int = 50, description: bytes = b"p") -> None:
        self.sender.begin(ticket)
        self.put_all(ticket, block_ids, chunk)
        self.sender.commit(ticket.ticket_id, description)

    def put_all(self, ticket: Ticket, block_ids: Sequence[int], chunk: int = 50, layers: int = 4) -> None:
        for start in range(0, ticket.num_tokens, chunk):
            for layer in range(layers):
                end = min(ticket.num_tokens, start + chunk)
                self.sender.put(ticket.ticket_id, layer, start, end, block_ids)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for far in self.far:
            far.close()
        for transfer in self.transfers:
            transfer.close()
        for process in self.processes:
            process.kill()
            process.communicate(timeout=10.0)  # closes its stdin too
        for pool in (*self.p_pools, *self.d_pools):
            pool.close()


def start_half(layout: PoolLayout, settings: RankTransferSettings, end: socket.socket) -> "subprocess.Popen[bytes]":
    """Start a process that moves the KV of one rank over a pool of its own, with `end`, which is closed here."""
    heads, rank = layout.model_tensors[0].heads, layout.rank
    numbers = (end.fileno(), heads, layout.num_blocks, layout.block_size, rank.number, rank.of)
    command = [sys.executable, "-c", _HALF, *map(str, numbers), to_json(settings).decode()]
    with end:
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(end.fileno(),))


@contextmanager
def make_rank_rig(transport: str, **settings: object) -> Iterator[RankRig]:
    rig = RankRig(transport, **settings)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()
