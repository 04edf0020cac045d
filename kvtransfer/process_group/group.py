"""One two-rank group: operations are issued on the device's thread and awaited on the group's waiter thread.

    caller --send|receive--> issuing thread (never waits)  --work-->  waiter thread (every wait has a deadline)
             the first one -> set-up thread of the group  --work-->

    MADE -> closed: no operation in progress, or aborted -> freed
                    stuck in a call -> UNFREED with its epoch, never used again -> freed

An operation that hangs blocks only this group's waiter thread, and no other link. A call that hangs blocks no other
link either: the calls that may hang run on the group's set-up thread. These are the first operation (it may create the
communicator), the abort, and the end of the group. remote_group.py is for collectives with which such a hang blocks
other links, and which have no abort (`own_process`).
"""

import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from devices.collectives import Collective
from kvtransfer.process_group.devices import Lease
from kvtransfer.process_group.issue import IssueQueue, result_within
from kvtransfer.stream import LinkLost
from kvtransfer.transport_interface import Timeouts
from native.ticker import run_time
from telemetry.logs import EventLogger

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging

_log = EventLogger("kvtransfer")
_TAG = 0
_LEAVE_S = 1.0
_MAX_REASON = 200
_FIRST_POLL_S, _LAST_POLL_S = 0.0002, 0.005


class Group:
    """Owner of one group and its threads; `keep` is the memory that operations may access while it exists.

    Operations are started by one thread; any thread may call `close`. `peer` is the other end's rank. `set_up` is the
    thread that made the group. An operation is issued within the progress timeout, and may then take `operation_s`.
    """

    def __init__(
        self, group: Any, collective: Collective, lease: Lease, *, name: str, peer: int, timeouts: Timeouts,
        keep: object, set_up: IssueQueue,
    ) -> None:  # fmt: skip
        self._group, self._collective, self._lease, self._keep = group, collective, lease, keep
        self._set_up, self._has_begun = set_up, False
        self._stream = lease.device.stream(collective)
        self._name, self._peer, self._timeouts = name, peer, timeouts
        self._under_way = 0
        self._fault: str | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._works: queue.SimpleQueue[tuple[Future[Any], Future[None]] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name=f"kv-group-{name}", daemon=True)
        self._waiter.start()

    def send(self, tensor: Any) -> "Future[None]":
        """Send a tensor; the future completes when the tensor may be reused, with LinkLost if the group failed."""
        return self._post(lambda: self._group.send([tensor], self._peer, _TAG))

    def receive(self, staging: "GroupStaging", num_bytes: int) -> "Future[None]":
        """Receive the peer's next tensor, of `num_bytes`, at the start of `staging`; the future is like that of `send`.

        Unless the collective is exact, all of `staging` is the target: a peer that sends more than announced overwrites
        the contents of `staging`; one that sends more than fits into `staging` ends this process (gloo).
        """
        tensor = staging.tensor(0, num_bytes if self._collective.exact else staging.num_bytes)
        return self._post(lambda: self._group.recv([tensor], self._peer, _TAG))

    def close(self) -> None:
        """Free the group, or abandon it if a call does not return; idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._works.put(None)
            busy = self._under_way > 0
        if busy:
            self._abort()
        self._waiter.join(_LEAVE_S)
        with self._lock:
            if self._keep is not None:
                self._lease.device.unfreed.add(self._name)
        if self.unfreed and self._under_way:
            _log.warning(
                "kv_group_not_freed", group=self._name, backend=self._collective.name, operations=self._under_way
            )

    @property
    def unfreed(self) -> bool:
        """Whether it is closed but cannot be freed yet."""
        return self._closing.is_set() and self._waiter.is_alive()

    def _post(self, operation: Callable[[], Any]) -> "Future[None]":
        def issued() -> Any:
            with self._stream():  # an empty stream: the memory is complete already
                return operation()

        done: Future[None] = Future()
        with self._lock:
            if self._closing.is_set():
                raise LinkLost("the group is closed")
            self._under_way += 1
            issue, self._has_begun = self._lease.device.issue if self._has_begun else self._set_up.submit, True
            self._works.put((issue(issued), done))
        return done

    def _abort(self) -> None:
        self._set_up.submit(self._abort_now)

    def _abort_now(self) -> None:
        """Abort on the thread that frees the group, so that no other thread drops the last reference to it."""
        abort, group = self._collective.abort, self._group
        if abort is not None and group is not None:
            abort(group, self._peer)

    def _wait(self) -> None:
        while (item := self._works.get()) is not None:
            issued, done = item
            work = None
            try:
                work = self._wait_until_issued(issued)
                self._wait_for_work(work)
            except Exception as error:  # noqa: BLE001  torch may raise anything; the caller gets LinkLost
                self._set_fault(error)
                done.set_exception(LinkLost(f"the group failed: {self._fault}"))
            else:
                done.set_result(None)
            with self._lock:
                self._under_way -= 1
            del item, issued, done, work
        self._free()

    def _wait_until_issued(self, issued: "Future[Any]") -> Any:
        limit_s = self._timeouts.progress_s
        try:
            return result_within(issued, limit_s)
        except TimeoutError:
            if issued.cancel():
                raise LinkLost(f"{self._lease.device.name} issued no operation for {limit_s:g} s") from None
            return result_within(issued, limit_s)  # it is being issued now

    def _wait_for_work(self, work: Any) -> None:
        if self._fault is not None:
            raise LinkLost(self._fault)
        limit_s = self._timeouts.operation_s
        if not self._collective.polls:
            until = time.monotonic() + limit_s  # gloo's own limit includes time in which this process cannot run
            try:
                work.wait(timedelta(seconds=limit_s))
            except RuntimeError:
                if time.monotonic() < until:
                    raise
                raise LinkLost(f"no data was transferred for {limit_s:g} s") from None
            return
        deadline, pause = run_time() + limit_s, _FIRST_POLL_S
        while not work.is_completed():
            if run_time() > deadline:
                raise LinkLost(f"no data was transferred for {limit_s:g} s")
            if self._closing.wait(pause):
                raise LinkLost("the link was closed here")
            pause = min(2 * pause, _LAST_POLL_S)
        work.wait(timedelta(seconds=limit_s))  # without a timeout, NCCL's wait reports no failure

    def _set_fault(self, error: Exception) -> None:
        if self._fault is not None:
            return
        self._fault = in_one_line(error)
        if not self._closing.is_set():
            _log.warning("kv_group_broken", group=self._name, backend=self._collective.name, reason=self._fault)
            self._abort()

    def _free(self) -> None:
        """Release the group on its thread; no operation accesses the memory any more."""
        holder = [self._group]
        self._group = None
        self._set_up.submit(holder.clear).result()  # kept until an abort, which may hang, has ended
        with self._lock:
            self._keep = None
            self._lease.device.unfreed.discard(self._name)
        self._lease.release()
        self._set_up.close()


def in_one_line(error: BaseException) -> str:
    """Return torch's message, without the position in its sources."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", text)[:_MAX_REASON]
