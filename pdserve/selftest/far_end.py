"""The receiving end of the links under test, in a child process of the self-test.

    self-test --stdin--> {"open": transport}      --> {} | {"lacking": words}
                         {"expect": seed}         --> {"ticket": {...}}
                         {"received": true}       --> {"bytes": ...}, once some have arrived or _RECEIVED_S have passed
                         {"digests": seed}        --> {"digests": [...]}
                         {"shut": true}           --> {}

Each message is a line of JSON; the reply to a request that failed is {"error": message}. Library output on stdout goes
to stderr. The process exits at the end of its input, whatever it is doing.
"""

import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from devices.interface import Device, Memory
from devices.table import open_device
from kvtransfer.receiver import KvReceiver
from native.ticker import start_ticker
from pdserve.selftest import link_pools
from telemetry import logs

HOST = "127.0.0.1"
_GONE = 1
_RECEIVED_S, _POLL_S = 2.0, 0.01


def main(argv: Sequence[str]) -> int:
    """Serve the links to device `argv[0]`, such as "cuda:1", until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logs.configure("ERROR")
    start_ticker()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="far-end-input", daemon=True).start()
    device: Device | None = None
    end: _End | None = None
    while True:
        request = json.loads(lines.get())
        try:
            if device is None:
                device = open_device(argv[0])
                device.activate()
            if "open" in request:
                end = _End(device, request["open"])
                reply = end.open()
            else:
                assert end is not None, "a link is opened first"
                reply = end.answer(request)
        except Exception as error:  # noqa: BLE001 - the outermost frame: driver libraries raise any exception
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(_GONE)  # the self-test is gone or done; a driver call may still be running


class _NoEvents:
    """Ignores all events as ReceiverEvents: the sender gets the outcome and reports it."""

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """Ignore a commit."""

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """Ignore a ticket that ended before its commit."""


class _End:
    """Owns the pool and the receiver of one link."""

    def __init__(self, device: Device, transport: str) -> None:
        self._device, self._transport = device, transport
        self._pool: Memory = link_pools.make_pool(device)
        self._receiver: KvReceiver | None = None

    def open(self) -> dict[str, Any]:
        """Open the receiver, or return why the transport is lacking and close the pool."""
        try:
            why = link_pools.lacking(self._transport, self._device, self._pool)
            if why is None:
                self._receiver = KvReceiver(
                    self._pool, instance_id="selftest-to", epoch=2, host=HOST, transports=(self._transport,),
                    lease_s=link_pools.SET_UP_S, events=_NoEvents(),
                )  # fmt: skip
        finally:
            if self._receiver is None:
                self._pool.close()
        return {} if why is None else {"lacking": why}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request after `open`."""
        assert self._receiver is not None, "the transport was lacking"
        if "expect" in request:
            blocks = link_pools.deal_blocks(self._pool.layout, request["expect"])
            ticket = self._receiver.open(
                secrets.token_hex(16), num_tokens=link_pools.NUM_TOKENS, first_token=0, block_ids=blocks
            )
            return {"ticket": asdict(ticket)}
        if "received" in request:
            deadline = time.monotonic() + _RECEIVED_S
            while not self._receiver.bytes_received and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return {"bytes": self._receiver.bytes_received}
        if "digests" in request:
            blocks = link_pools.deal_blocks(self._pool.layout, request["digests"])
            return {"digests": link_pools.digests(link_pools.read(self._pool), self._pool.layout, blocks)}
        try:
            self._receiver.close()
        finally:
            self._pool.close()
        return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
