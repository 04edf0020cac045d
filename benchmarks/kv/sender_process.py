"""The benchmark's P: one pool and one KvSender; it hands prompts to one or more Ds on the parent's commands."""

import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kv.control import LineClient, run_child
from benchmarks.kv.pool import expected_digest, fill, touched_pool
from benchmarks.kv.sampling import Sampler
from benchmarks.kv.shapes import block_table, shape_named
from kvtransfer.interface import SendStats
from kvtransfer.sender import KvSender
from wire.errors import PdserveError
from wire.types import KvEndpoint, Ticket

DEADLINE_S = 120.0


class Prefill:
    """Owner of the pool, the sender and the hand-offs in progress."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._shape = shape_named(config["shape"])
        self._num_blocks = int(config["num_blocks"])
        self._pool = touched_pool(self._shape.layout(self._num_blocks), config["device"])
        fill(self._pool, 1)
        self._receivers = [LineClient(path) for path in config["sockets"]]
        self._sampler = Sampler() if config["profile"] else None
        self._changed = threading.Condition()
        self._open: set[str] = set()
        self._tables: dict[tuple[int, int, bool], tuple[int, ...]] = {}
        self._error: PdserveError | None = None
        self._sender = KvSender(
            self._pool, instance_id=config["name"], epoch=secrets.randbits(60) + 1, transports=(config["transport"],),
            events=self, progress_age=lambda: 0.0, digests=config["digest"],
        )  # fmt: skip

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer the parent."""
        match command.pop("op"):
            case "hand":
                return self.hand(**command)
            case "stream":
                return self.stream(**command)
            case "fill":
                fill(self._pool, command["seed"])
                return {}
            case "digest":
                blocks = self._blocks(command["tokens"], command["first"], command["scattered"])
                return {"digest": expected_digest(self._pool, blocks, command["tokens"])}
            case "profile":
                assert self._sampler is not None
                return self._sampler.take()
        raise ValueError("no such command")

    def hand(
        self, tokens: int, chunk: int, scattered: bool = False, first: int = 0, count: int = 1, stride: int = 0
    ) -> dict[str, Any]:
        """Hand off `count` prompts at once, prompt i in the blocks from `first` + i * `stride` on.

        Times in seconds: `reserved_s`, until the last ticket is reserved; `begun_s`, to begin all tickets; `seconds`,
        from the first put to the last ack; `total_s`, all of it.
        """
        began = time.perf_counter()
        firsts = [first + i * stride for i in range(count)]
        tickets = [self._reserve(self._receivers[0], tokens, at, scattered) for at in firsts]
        reserved = time.perf_counter()
        for ticket in tickets:
            self._sender.begin(ticket)
        begun = time.perf_counter()
        for start in range(0, tokens, chunk):
            self._put_chunk(tickets, firsts, start, min(tokens, start + chunk), scattered)
        for ticket in tickets:
            self._sender.commit(ticket.ticket_id, b"prompt")
        put = time.perf_counter()
        self._wait(0)
        ended = time.perf_counter()
        return {
            "seconds": ended - begun, "total_s": ended - began, "reserved_s": reserved - began,
            "begun_s": begun - reserved, "put_s": put - begun, "acked_s": ended - put,
        }  # fmt: skip

    def stream(self, tokens: int, chunk: int, window: int, seconds: float) -> dict[str, Any]:
        """Hand off prompts to all Ds in turn, at most `window` at once, for `seconds`; return how many were acked."""
        per_prompt = self._pool.layout.num_blocks_for(tokens)
        places = max(1, self._num_blocks // per_prompt)
        began, number = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            first = number % places * per_prompt
            ticket = self._reserve(self._receivers[number % len(self._receivers)], tokens, first, False)
            self._sender.begin(ticket)
            for start in range(0, tokens, chunk):
                self._put_chunk([ticket], [first], start, min(tokens, start + chunk), False)
            self._sender.commit(ticket.ticket_id, b"prompt")
            number += 1
            self._wait(window - 1)
        self._wait(0)
        return {"seconds": time.perf_counter() - began, "hand_offs": number}

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """Remove the hand-off from the open ones."""
        with self._changed:
            self._open.discard(ticket_id)
            self._changed.notify()

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """Keep the error; it ends the measurement."""
        with self._changed:
            self._error = error
            self._changed.notify()

    def close(self) -> None:
        """End the links."""
        self._sender.close()

    def _put_chunk(self, tickets: list[Ticket], firsts: list[int], start: int, end: int, scattered: bool) -> None:
        for ticket, first in zip(tickets, firsts, strict=True):
            blocks = self._blocks(ticket.num_tokens, first, scattered)
            for layer in range(self._shape.num_layers):
                self._sender.put(ticket.ticket_id, layer, start, end, blocks)

    def _reserve(self, receiver: LineClient, tokens: int, first: int, scattered: bool) -> Ticket:
        fields = receiver.ask(op="reserve", tokens=tokens, first=first, scattered=scattered)
        fields["endpoints"] = tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])
        ticket = Ticket(**fields)
        with self._changed:
            self._open.add(ticket.ticket_id)
        return ticket

    def _wait(self, maximum: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._error is not None or len(self._open) <= maximum, DEADLINE_S)
            if self._error is not None:
                raise self._error
            if not done:
                raise TimeoutError(f"hand-offs without an ack after {DEADLINE_S} s: {len(self._open)}")

    def _blocks(self, tokens: int, first: int, scattered: bool) -> tuple[int, ...]:
        key = (tokens, first, scattered)
        if key not in self._tables:
            count = self._pool.layout.num_blocks_for(tokens)
            self._tables[key] = block_table(self._num_blocks, first, count, scattered=scattered)
        return self._tables[key]


if __name__ == "__main__":
    run_child(
        Prefill, about=__doc__, fields="name, shape, num_blocks, transport, digest, sockets, profile, device, core"
    )
