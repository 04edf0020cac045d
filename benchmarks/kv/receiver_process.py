"""The benchmark's D: one pool and one KvReceiver. P gets tickets over a Unix socket; the parent controls D."""

import secrets
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kv.control import LineServer, run_child
from benchmarks.kv.pool import expected_digest, fill, touched_pool
from benchmarks.kv.sampling import Sampler
from benchmarks.kv.shapes import block_table, shape_named
from kvtransfer.receiver import KvReceiver


class Decode:
    """Owner of the pool and the receiver; P's reservation names the blocks of a hand-off."""

    def __init__(self, config: dict[str, Any]) -> None:
        shape = shape_named(config["shape"])
        self._num_blocks = int(config["num_blocks"])
        self._pool = touched_pool(shape.layout(self._num_blocks), config["device"])
        self._sampler = Sampler() if config["profile"] else None
        self._ends: deque[str] = deque(maxlen=16)
        self._receiver = KvReceiver(
            self._pool, instance_id=config["name"], epoch=secrets.randbits(60) + 1, host="127.0.0.1",
            transports=(config["transport"],), events=self, digests=config["digest"],
        )  # fmt: skip
        LineServer(config["socket"], self.handle)

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer P or the parent."""
        match command["op"]:
            case "reserve":
                tokens = int(command["tokens"])
                blocks = self._blocks(tokens, int(command["first"]), bool(command["scattered"]))
                ticket = self._receiver.open(secrets.token_hex(16), num_tokens=tokens, first_token=0, block_ids=blocks)
                return asdict(ticket)
            case "clear":
                fill(self._pool, None)
                return {}
            case "digest":
                blocks = self._blocks(int(command["tokens"]), int(command["first"]), bool(command["scattered"]))
                return {"digest": expected_digest(self._pool, blocks, int(command["tokens"]))}
            case "profile":
                assert self._sampler is not None
                return self._sampler.take()
            case "ends":
                return {"ends": list(self._ends)}
        raise ValueError(f"no command {command['op']!r}")

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """Do nothing: the benchmark admits no sequence."""

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """Keep the reason for the command `ends`."""
        self._ends.append(reason)

    def close(self) -> None:
        """Stop listening."""
        self._receiver.close()

    def _blocks(self, tokens: int, first: int, scattered: bool) -> tuple[int, ...]:
        count = self._pool.layout.num_blocks_for(tokens)
        return block_table(self._num_blocks, first, count, scattered=scattered)


if __name__ == "__main__":
    run_child(Decode, about=__doc__, fields="name, shape, num_blocks, transport, digest, socket, profile, device, core")
