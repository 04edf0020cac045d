"""The receiving end of the links that a self-test tries, in a process of its own: the self-test's child.

    self-test --stdin--> {"open": transport}      --> {} | {"lacking": words}
                         {"expect": seed}         --> {"ticket": {...}}
                         {"digests": seed}        --> {"digests": [...]}
                         {"shut": true}           --> {}

A line of JSON each way; {"error": words} where it went wrong. What libraries print on stdout goes to stderr. The
process ends when its input does, whatever it is doing then.
"""

import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from devices.interface import Device, Memory
from devices.table import open_device
from kvtransfer.receiver import KvReceiver
from pdserve.selftest import link_pools
from telemetry import logs

HOST = "127.0.0.1"
_GONE = 1


def main(argv: Sequence[str]) -> int:
    """Serve the links to `argv[0]`, as "cuda:1", until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logs.configure("ERROR")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="far-end-input", daemon=True).start()
    device: Device | None = None
    end: _End | None = None
    while True:
        asked = json.loads(lines.get())
        try:
            if device is None:
                device = open_device(argv[0])
                device.activate()
            if "open" in asked:
                end = _End(device, asked["open"])
                reply = end.open()
            else:
                assert end is not None, "a link is opened first"
                reply = end.answer(asked)
        except Exception as error:  # noqa: BLE001 - the outermost frame: a driver's library raises what it likes
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(_GONE)  # the self-test is gone or has no more to ask; a driver's call may be under way


class _Unheard:
    """Implements ReceiverEvents: the sender hears of it all the same, and tells."""

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """It is all there."""

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """It ended before its commit."""


class _End:
    """Owner of the pool and the receiver of one link."""

    def __init__(self, device: Device, transport: str) -> None:
        self._device, self._transport = device, transport
        self._pool: Memory = link_pools.make_pool(device)
        self._receiver: KvReceiver | None = None

    def open(self) -> dict[str, Any]:
        """Offer the transport. The pool is closed where it is not offered."""
        try:
            why = link_pools.lacking(self._transport, self._device, self._pool)
            if why is None:
                self._receiver = KvReceiver(
                    self._pool, instance_id="selftest-to", epoch=2, host=HOST, transports=(self._transport,),
                    events=_Unheard(),
                )  # fmt: skip
        finally:
            if self._receiver is None:
                self._pool.close()
        return {} if why is None else {"lacking": why}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what comes after `open`."""
        assert self._receiver is not None, "the transport was lacking"
        if "expect" in asked:
            blocks = link_pools.deal_blocks(self._pool.layout, asked["expect"])
            ticket = self._receiver.open(
                secrets.token_hex(16), num_tokens=link_pools.NUM_TOKENS, first_token=0, block_ids=blocks
            )
            return {"ticket": asdict(ticket)}
        if "digests" in asked:
            blocks = link_pools.deal_blocks(self._pool.layout, asked["digests"])
            return {"digests": link_pools.digests(link_pools.read(self._pool), self._pool.layout, blocks)}
        try:
            self._receiver.close()
        finally:
            self._pool.close()
        return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
