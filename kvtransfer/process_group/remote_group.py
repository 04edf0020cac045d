"""A link's group in a process of its own, so that killing that process aborts whatever hangs in it.

    outlet | inlet --SEND, RECEIVE--> the group's process (child.py), which maps the staging too
    thread of the group <--DONE, FAILED-- starts the process, relays its set-up messages, and ends it

    MAKING -> MADE -> closed: killed, reaped, then the staging is freed; nothing else can access it

A process that is lost, or that reports nothing within the time limit, ends this group and no other.
"""

import contextlib
import os
import select
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from devices.collectives import Collective
from devices.shared_memory import SharedMemory
from kvtransfer.hello import Hello
from kvtransfer.link_codec import decode
from kvtransfer.link_messages import MessageType, Refuse
from kvtransfer.process_group.child_messages import PLACE, GroupMessage, GroupSetup
from kvtransfer.process_group.exchange import SetupExchange
from kvtransfer.process_group.group import in_one_line
from kvtransfer.process_group.group_setup import agree, group_name, prove, refuse_if_full, refuse_if_unfreed
from kvtransfer.process_group.issue import result_within
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Timeouts
from native.ticker import run_time
from processes.child import ChildProcess
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import to_json
from telemetry.logs import EventLogger

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging

_log = EventLogger("kvtransfer")

PROGRAM = "kvtransfer.process_group.child"
_POLL_S = 0.5
_SEND_S = 5.0
_REST_S = 5.0
"""Time limit for the rest of a message from the peer, once it has begun."""
_LEAVE_S = 2.0
"""Time limit for a killed process to end; if it does not, its group and staging are kept."""
_UNFREED: defaultdict[str, set[str]] = defaultdict(set)
"""The groups whose processes have not ended, by device."""


class RemoteGroup:
    """Owner of the group's process, the thread that started it, and the staging that both map.

    Operations are started by one thread; any thread may call `close`. See LinkGroup. Until `set_up_ended` the thread
    uses the link's stream, and every operation may take as long as the set-up. If the group fails, it ends the link.
    """

    def __init__(self, setup: GroupSetup, memory: SharedMemory, stream: Stream, defaults: Mapping[str, str]) -> None:
        self._setup, self._memory, self._defaults = setup, memory, defaults
        self._stream, self._is_setting_up, self._is_wanted = stream, True, False
        self._operation_s, self._since = setup.timeout_s, run_time()
        self.made: Future[None] = Future()
        self._awaited = deque([self.made])
        self._fault: str | None = None
        self._process: ChildProcess | None = None
        self._closing = self._is_freed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"kv-group-{setup.name[:8]}", daemon=True)
        self._thread.start()

    def send(self, tensor: Any) -> "Future[None]":
        """See LinkGroup. The bytes are complete: gathering waits for the device."""
        return self._post(GroupMessage.SEND, tensor.data_ptr() - self._memory.tensor.data_ptr(), tensor.numel())

    def receive(self, staging: "GroupStaging", num_bytes: int) -> "Future[None]":
        """See LinkGroup."""
        return self._post(GroupMessage.RECEIVE, 0, num_bytes)

    def set_up_ended(self, operation_s: float) -> None:
        """Leave the link's messages to its owner; from now on each operation may take `operation_s`."""
        self._is_setting_up, self._operation_s = False, operation_s

    def close(self) -> None:
        """Kill the process, and free the staging when it has ended; idempotent."""
        with self._lock:
            self._closing, process = True, self._process
        if self._is_setting_up:
            self._stream.shutdown()
        if process is not None:
            process.kill()
        self._thread.join(_LEAVE_S)
        with self._lock:
            if self.unfreed:
                _UNFREED[self._setup.device].add(self._setup.name)
        if self.unfreed:
            _log.warning("kv_group_not_freed", group=self._setup.name, backend=self._setup.collective)

    @property
    def unfreed(self) -> bool:
        """Whether it is closed, but its process has not ended."""
        return self._closing and not self._is_freed

    def _post(self, kind: GroupMessage, start: int, num_bytes: int) -> "Future[None]":
        done: Future[None] = Future()
        with self._lock:
            if self._fault is not None or self._closing:
                raise LinkLost(f"the group failed: {self._fault}" if self._fault else "the group is closed")
            if not self._awaited:
                self._since = run_time()
            self._awaited.append(done)
        try:
            self._channel.send(kind, PLACE.pack(start, num_bytes), timeout_s=_SEND_S)
        except OSError as error:
            raise LinkLost(f"the group failed: {self._fault or error}") from error
        return done

    def _run(self) -> None:
        try:
            self._start()
            self._serve()
        except ChannelClosed:
            self._fail(f"its process {self._process_end()}")
        except Exception as error:  # noqa: BLE001  the outermost frame of this group's thread
            self._fail(in_one_line(error))
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                self._process.close()
            self._process.wait(None)  # after that nothing accesses the staging
        self._memory.free()
        with self._lock:
            self._is_freed = True
            _UNFREED[self._setup.device].discard(self._setup.name)

    def _start(self) -> None:
        """Start the process; the kernel kills it when this thread ends."""
        with self._lock:
            if self._closing:
                raise LinkLost("the link was closed here")
            self._process = ChildProcess(PROGRAM, environ={**self._defaults, **os.environ})
        self._channel = Channel(self._process.connection, GroupMessage)
        self._channel.send(GroupMessage.MAKE, to_json(self._setup), timeout_s=_SEND_S, fds=self._memory.fds)

    def _serve(self) -> None:
        while True:
            ready = self._await_either()
            if self._channel.has_more(0.0):
                self._handle(self._channel.receive(_SEND_S))
            elif ready and self._is_setting_up:
                self._relay()
            elif self._awaited and run_time() - self._since > self._operation_s:
                raise LinkLost(f"no data was transferred for {self._operation_s:g} s")

    def _await_either(self) -> bool:
        """Wait for a message of the process or, in the set-up, one that `_relay` handles; at most the poll interval."""
        assert self._process is not None, "it was started"
        poll = select.poll()
        poll.register(self._process.connection, select.POLLIN)
        if self._is_setting_up:
            poll.register(self._stream.socket, select.POLLIN if self._is_wanted else select.POLLRDHUP)
        return bool(poll.poll(_POLL_S * 1000))

    def _relay(self) -> None:
        """Pass the peer's message to the process, which waits for it. Raises LinkLost if the peer closed its end."""
        kind, body = self._stream.receive_message(first_byte_s=_REST_S, whole_s=_REST_S)
        if kind is MessageType.REFUSE:
            refusal = decode(kind, body)
            assert isinstance(refusal, Refuse)
            raise LinkLost(f"the peer refused the link: {refusal.reason}")
        if self._is_wanted:
            self._is_wanted = False
            self._channel.send(GroupMessage.ARRIVED, bytes([kind]) + body, timeout_s=_SEND_S)

    def _handle(self, message: Message[GroupMessage]) -> None:
        if message.kind is GroupMessage.DONE:
            with self._lock:
                done, self._since = self._awaited.popleft(), run_time()
            done.set_result(None)
        elif message.kind is GroupMessage.FAILED:
            raise LinkLost(message.payload.decode("utf-8", "replace"))
        elif not self._is_setting_up:
            raise LinkLost(f"received {message.kind.name} after the set-up")
        elif message.kind is GroupMessage.FORWARD:
            self._stream.send([message.payload])
        elif message.kind is GroupMessage.NEXT:
            self._is_wanted = True

    def _process_end(self) -> str:
        assert self._process is not None, "its channel was closed"
        try:
            return f"ended with status {self._process.wait(_LEAVE_S)}"
        except TimeoutError:
            return "closed its channel"

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._fault = "the link was closed here" if self._closing else reason
            awaited, self._awaited = self._awaited, deque()
        if not self._closing:
            _log.warning("kv_group_broken", group=self._setup.name, backend=self._setup.collective, reason=self._fault)
        for done in awaited:
            done.set_exception(LinkLost(f"the group failed: {self._fault}"))
        if not self._closing:
            self._stream.shutdown()  # an idle link notices it too


def make_remote_group(
    stream: Stream, hello: Hello, rank: int, collective: Collective, device: str, staging: tuple[str, int],
    timeouts: Timeouts,
) -> "tuple[RemoteGroup, GroupStaging]":  # fmt: skip
    """Return this end's group, once it is proven to reach the other end, and its staging.

    The argument `staging` is the device and size of the staging. No other link waits for this: processes make their
    communicators independently of each other. Raises LinkLost, WireError, Unavailable.
    """
    from kvtransfer.process_group.payload import share_staging

    exchange, limit_s = SetupExchange(stream, group_name(hello)), max(timeouts.connect_s, collective.make_s)
    agree(exchange, collective, rank, timeouts)
    refuse_if_unfreed(_UNFREED[device], device)
    refuse_if_full(collective, device)
    memory, moved = share_staging(*staging)
    host = stream.socket.getsockname()[0]
    setup = GroupSetup(group_name(hello), collective.name, device, rank, host, limit_s, *staging, memory.handle)
    group, end = RemoteGroup(setup, memory, stream, collective.defaults), run_time() + limit_s
    try:
        result_within(group.made, limit_s)
        prove(group, moved, hello, rank, max(0.0, end - run_time()))
        group.set_up_ended(timeouts.operation_s)
        exchange.finish(timeouts.progress_s)
    except TimeoutError as error:
        group.close()
        raise LinkLost(f"no {collective.name} group within {limit_s:g} s") from error
    except BaseException:
        group.close()
        raise
    return group, moved
