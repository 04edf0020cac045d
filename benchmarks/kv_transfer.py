"""How fast KV crosses between two processes, over each transport, beside a plain copy and a digest in the same run.

    python benchmarks/kv_transfer.py                     both transports, 16, 64 and 256 MiB and one prompt by layers
    python benchmarks/kv_transfer.py --fragmented        every block apart from its neighbours

Seconds run from the first put to the ack; each row is the median of --repeats, after one warm-up.
"""

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.host_pool import HostPool
from kvtransfer.digest import digest_of
from kvtransfer.interface import SendStats
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from wire.errors import PdserveError
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import KvEndpoint, Ticket

MIB = 1 << 20
DEADLINE_S = 60.0


class Events:
    """Waits for the ending of one ticket at a time."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: PdserveError | None = None

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        self.done.set()

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        self.error = error
        self.done.set()

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        pass

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        print(f"ended: {reason}", file=sys.stderr)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; the default shape is that of SmolLM2-135M."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 64, 256], help="MiB of KV")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--peer-block-size", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=512, help="tokens put at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fragmented", action="store_true")
    parser.add_argument("--receive", default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_pool(options: argparse.Namespace, block_size: int) -> HostPool:
    """Make a pool that holds the largest size."""
    tensors = [
        KvTensor(layer, name, options.heads, options.head_dim, options.dtype)
        for layer in range(options.layers)
        for name in ("k", "v")
    ]
    token_bytes = sum(tensor.token_bytes for tensor in tensors)
    blocks = -(-max(options.sizes) * MIB // token_bytes) // block_size + 64
    pool = HostPool(PoolLayout(tensors, num_blocks=blocks, block_size=block_size))
    page = random.Random(0).randbytes(MIB)
    for at in range(0, len(pool.buffer) - MIB, MIB):
        pool.buffer[at : at + MIB] = page
    return pool


def block_table(pool: HostPool, num_tokens: int, *, fragmented: bool) -> tuple[int, ...]:
    """Return the blocks of a prompt: neighbours, or shuffled."""
    blocks = list(range(pool.layout.num_blocks))
    if fragmented:
        random.Random(1).shuffle(blocks)
    return tuple(blocks[: pool.layout.num_blocks_for(num_tokens)])


def receive(options: argparse.Namespace) -> None:
    """The receiving process: answers each number of tokens on standard input with a ticket."""
    pool = make_pool(options, options.peer_block_size or options.block_size)
    receiver = KvReceiver(
        pool, instance_id="decode", epoch=1, host="127.0.0.1", transports=(options.receive,), events=Events()
    )
    for line in sys.stdin:
        blocks = block_table(pool, int(line), fragmented=options.fragmented)
        ticket = receiver.open(secrets.token_hex(16), num_tokens=int(line), first_token=0, block_ids=blocks)
        print(json.dumps(asdict(ticket)), flush=True)
    receiver.close()


def ask_ticket(peer: "subprocess.Popen[str]", num_tokens: int) -> Ticket:
    """Ask the receiving process for a ticket."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{num_tokens}\n")
    peer.stdin.flush()
    fields = json.loads(peer.stdout.readline())
    fields["endpoints"] = tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])
    return Ticket(**fields)


def hand_over(
    sender: KvSender, events: Events, ticket: Ticket, blocks: tuple[int, ...], options: argparse.Namespace
) -> tuple[float, float]:
    """Return seconds from the first put to the ack, and seconds of one put call."""
    events.done.clear()
    sender.begin(ticket)
    started, num_puts = time.perf_counter(), 0
    for start in range(0, ticket.num_tokens, options.chunk):
        end = min(ticket.num_tokens, start + options.chunk)
        for layer in range(options.layers):
            sender.put(ticket.ticket_id, layer, start, end, blocks)
            num_puts += 1
    put_s = time.perf_counter() - started
    sender.commit(ticket.ticket_id, b"prompt")
    assert events.done.wait(DEADLINE_S), "no ack"
    if events.error is not None:
        raise events.error
    return time.perf_counter() - started, put_s / num_puts


def measure(transport: str, options: argparse.Namespace) -> None:
    """Print the rows of one transport."""
    pool, events = make_pool(options, options.block_size), Events()
    command = [sys.executable, __file__, *sys.argv[1:], "--receive", transport]
    sender = KvSender(
        pool, instance_id="prefill", epoch=2, transports=(transport,), events=events, progress_age=lambda: 0.0
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        sizes = [(f"{options.chunk} tokens", options.chunk)]
        sizes += [(f"{size} MiB", size * MIB // pool.layout.token_bytes) for size in options.sizes]
        for name, num_tokens in sizes:
            blocks = block_table(pool, num_tokens, fragmented=options.fragmented)
            runs = [
                hand_over(sender, events, ask_ticket(peer, num_tokens), blocks, options)
                for _ in range(options.repeats + 1)
            ][1:]
            row(transport, name, num_tokens * pool.layout.token_bytes, *map(statistics.median, zip(*runs, strict=True)))
        sender.close()
        assert peer.stdin is not None
        peer.stdin.close()


def baseline(options: argparse.Namespace) -> None:
    """Print what one plain copy and one digest of as many bytes cost here."""
    for size in options.sizes:
        source, target = memoryview(bytearray(size * MIB)), memoryview(bytearray(size * MIB))
        copies, digests = [], []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            target[:] = source
            copies.append(time.perf_counter() - started)
            started = time.perf_counter()
            digest_of([target])
            digests.append(time.perf_counter() - started)
        row("copy", f"{size} MiB", size * MIB, statistics.median(copies[1:]))
        row("digest", f"{size} MiB", size * MIB, statistics.median(digests[1:]))


def row(what: str, name: str, num_bytes: int, seconds: float, put_s: float | None = None) -> None:
    """Print one row."""
    put = "" if put_s is None else f"{put_s * 1e6:8.1f}"
    print(f"{what:8} {name:>12} {num_bytes / MIB:9.1f} {seconds * 1e3:9.2f} {num_bytes / seconds / 1e9:8.2f} {put}")


def main() -> None:
    """Run as the parent, or as the receiving process."""
    options = parse()
    if options.receive is not None:
        receive(options)
        return
    print(f"{'what':8} {'size':>12} {'MiB':>9} {'ms':>9} {'GB/s':>8} {'put us':>8}")
    baseline(options)
    for transport in options.transports:
        measure(transport, options)


if __name__ == "__main__":
    main()
