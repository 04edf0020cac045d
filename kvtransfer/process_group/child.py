"""The process of one link's group: it makes the communicator, runs the transfers, and is killed to abort them.

python -P -m kvtransfer.process_group.child CHANNEL_FD PARENT_PID

    main thread: the serving process's messages --> issuing thread: the calls, each of which may hang --> waiter thread

The serving process enforces every time limit by killing this process, which also ends when the serving process ends.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from devices.collectives import Collective, collective_named
from devices.table import open_device
from kvtransfer.link_messages import MessageType
from kvtransfer.process_group.child_messages import PLACE, GroupMessage, GroupSetup
from kvtransfer.process_group.exchange import SetupExchange
from kvtransfer.process_group.issue import IssueQueue
from native.ticker import run_time, start_ticker
from processes.child_limits import end_with
from processes.rank_channel import Channel, ChannelClosed
from processes.rank_payloads import from_json

if TYPE_CHECKING:
    import torch

_RANKS, _TAG = 2, 0
_START_S, _SEND_S = 60.0, 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.0002, 0.005
_WAIT = timedelta(seconds=60)  # for completed work; without a limit some backends report no failure


class _Reports:
    """Our sending end of the channel, used by two threads. Implements exchange.SetupStream for the group's store.

    As a SetupStream it relays the link's messages, which only the serving process can send and receive.
    """

    def __init__(self, channel: Channel[GroupMessage]) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self.arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def report(self, kind: GroupMessage, payload: bytes = b"") -> None:
        with self._lock:
            self._channel.send(kind, payload, timeout_s=_SEND_S)

    def send(self, pieces: Sequence[memoryview | bytes]) -> None:
        self.report(GroupMessage.FORWARD, b"".join(pieces))

    def receive_message(self, *, first_byte_s: float, whole_s: float) -> tuple[MessageType, bytearray]:
        self.report(GroupMessage.NEXT)
        message = self.arrived.get(timeout=whole_s)
        return MessageType(message[0]), bytearray(message[1:])


class GroupProcess:
    """Owner of the group, and of the threads that issue its operations and report their results."""

    def __init__(self, channel: Channel[GroupMessage], setup: GroupSetup, fds: tuple[int, ...]) -> None:
        self._setup, self._reports = setup, _Reports(channel)
        self._collective: Collective = collective_named(setup.collective)
        self._group: Any = None
        self._staging: torch.Tensor | None = None
        self._issue = IssueQueue("group-issue")
        self._issued: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="group-wait", daemon=True).start()
        self._queue(lambda: self._make(fds))

    def handle(self, kind: GroupMessage, payload: bytes) -> None:
        """Handle a message of the serving process, without waiting for anything."""
        if kind is GroupMessage.ARRIVED:
            self._reports.arrived.put(payload)
            return
        start, num_bytes = PLACE.unpack(payload)
        peer = 1 - self._setup.rank
        if kind is GroupMessage.SEND:
            self._queue(lambda: self._group.send([self._staging_part(start, num_bytes)], peer, _TAG))
        elif kind is GroupMessage.RECEIVE:
            self._queue(lambda: self._group.recv([self._staging_part(start, num_bytes)], peer, _TAG))
        else:
            raise ValueError(f"unexpected message {kind.name}")

    def _make(self, fds: tuple[int, ...]) -> None:
        from kvtransfer.process_group.store import LinkStore

        setup = self._setup
        device = open_device(setup.staging_device)
        self._staging = device.map_shared(setup.handle, fds, setup.num_bytes)
        exchange = SetupExchange(self._reports, setup.name)
        exchange.deadline = run_time() + setup.timeout_s
        self._group = self._collective.make(
            LinkStore(exchange), setup.rank, _RANKS, setup.host, setup.timeout_s, setup.device
        )

    def _staging_part(self, start: int, num_bytes: int) -> "torch.Tensor":
        assert self._staging is not None
        return self._staging[start : start + num_bytes]  # [num_bytes]

    def _queue(self, call: Callable[[], Any]) -> None:
        self._issued.put(self._issue.submit(call))

    def _wait(self) -> None:
        while True:
            issued = self._issued.get()
            try:
                work = issued.result()
                if work is not None:
                    _wait_for_work(work)
            except Exception as error:  # noqa: BLE001  torch may raise anything; the serving process gets the text
                self._reports.report(GroupMessage.FAILED, str(error).encode())
            else:
                self._reports.report(GroupMessage.DONE)


def _wait_for_work(work: Any) -> None:
    pause = _FIRST_POLL_S
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
    work.wait(_WAIT)


def main(argv: Sequence[str]) -> int:
    """Serve one group until the channel closes; return the exit status."""
    channel = Channel(socket.socket(fileno=int(argv[0])), GroupMessage)
    end_with(int(argv[1]))  # the group's thread in the serving process outlives this process
    start_ticker()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        made = channel.receive(_START_S)
        group = GroupProcess(channel, from_json(GroupSetup, made.payload), made.fds)
        while True:
            message = channel.receive(None)
            group.handle(message.kind, message.payload)
    except ChannelClosed:
        return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # threads that hang in a call would delay a regular end
