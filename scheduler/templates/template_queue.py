"""A queue of chat templates to render in one process that can be killed."""

import asyncio
from collections import deque
from dataclasses import dataclass

from scheduler.templates.child import TemplateChild
from scheduler.templates.frame_kinds import TEXT
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest, Overloaded, PdserveError, Unavailable

_START_S = 60.0
_AHEAD = 16  # jobs sent ahead, so that the process need not wait for the event loop
_AHEAD_BYTES = 2**20
_MAX_HELD_BYTES = 64 * 2**20
_log = EventLogger("templates")


@dataclass(eq=False, slots=True)
class _Job:
    template: bytes
    job: bytes
    param: str
    answer: asyncio.Future[str]

    @property
    def num_bytes(self) -> int:
        return len(self.template) + len(self.job)


class TemplateQueue:
    """Owner of the process and its queue of jobs, answered in order.

    A job that uses too much time or memory, or that kills the process, fails alone: the process is replaced, and the
    following jobs are sent again.
    """

    def __init__(self, render_s: float, render_timeout_s: float, queue_timeout_s: float) -> None:
        """Limits on a render: `render_s` of CPU time, `render_timeout_s` in all; `queue_timeout_s` with its wait."""
        self._render_s, self._render_timeout_s, self._queue_timeout_s = render_s, render_timeout_s, queue_timeout_s
        self._waiting: deque[_Job] = deque()
        self._sent: deque[_Job] = deque()
        self._held_bytes = 0
        self._child: TemplateChild | None = None
        self._children: set[TemplateChild] = set()  # killed ones too, until they are reaped
        self._starting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._first_since = 0.0  # when the current first job became the first

    @property
    def pid(self) -> int | None:
        """The process id."""
        return None if self._child is None else self._child.pid

    async def render(self, template: bytes, job: bytes, param: str) -> str:
        """Return the text. Raises InvalidRequest for `param`, Overloaded if others take too long, Unavailable."""
        waiting = _Job(template, job, param, asyncio.get_running_loop().create_future())
        if self._held_bytes and self._held_bytes + waiting.num_bytes > _MAX_HELD_BYTES:
            num_bytes = self._held_bytes + waiting.num_bytes
            raise Overloaded(f"{num_bytes} bytes would wait for chat templates, but the limit is {_MAX_HELD_BYTES}")
        self._held_bytes += waiting.num_bytes
        self._waiting.append(waiting)
        self._send_waiting()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await waiting.answer
        except TimeoutError:
            raise Overloaded(f"chat templates of other requests took more than {self._queue_timeout_s:g} s") from None

    async def start(self) -> None:
        """Start the process now, so that the first request does not wait for it. Raises Unavailable."""
        if self._child is None:
            await asyncio.shield(self._begin_start())
        if self._child is None:
            raise Unavailable("the process that renders chat templates did not start")

    async def close(self) -> None:
        """Kill the process; waiting jobs fail as Unavailable."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._watch is not None:
            self._watch.cancel()
        self._drop_child()
        self._fail_waiting(Unavailable("chat templates are no longer rendered: the scheduler is shutting down"))
        await asyncio.gather(*(child.wait_gone() for child in self._children))
        self._children.clear()

    def _send_waiting(self) -> None:
        if self._child is None and self._waiting:
            self._begin_start()
        while self._child is not None and self._waiting and self._may_send(self._waiting[0]):
            job = self._waiting.popleft()
            if job.answer.done():  # its caller has disconnected
                self._held_bytes -= job.num_bytes
                continue
            self._sent.append(job)
            if len(self._sent) == 1:
                self._watch_first()
            self._child.send(job.template, job.job)

    def _may_send(self, job: _Job) -> bool:
        if not self._sent:
            return True
        return len(self._sent) < _AHEAD and sum(sent.num_bytes for sent in self._sent) + job.num_bytes <= _AHEAD_BYTES

    def _on_answer(self, kind: bytes, text: bytes) -> None:
        job = self._take_first()
        if job.answer.done():
            pass  # its caller has disconnected
        elif kind.lower() == TEXT:
            job.answer.set_result(text.decode())
        else:
            message = f"the chat template cannot render this: {text.decode()}"
            job.answer.set_exception(InvalidRequest(message, job.param))
        if self._sent:
            self._watch_first()
        if kind.isupper():
            self._replace_child("it kept too much memory")
        else:
            self._send_waiting()

    def _on_child_end(self) -> None:
        self._fail_first(f"the chat template took more than {self._render_s:g} s of CPU time, or too much memory")
        self._drop_child()
        self._send_waiting()

    def _watch_first(self) -> None:
        """Start the time limit of the new first job. One timer serves all jobs; it is set again when it has run out."""
        loop = asyncio.get_running_loop()
        self._first_since = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._render_timeout_s, self._look_at_first)

    def _look_at_first(self) -> None:
        self._watch = None
        loop = asyncio.get_running_loop()
        ends = self._first_since + self._render_timeout_s
        if self._sent and loop.time() < ends:
            self._watch = loop.call_at(ends, self._look_at_first)
        elif self._sent:
            self._fail_first(f"the chat template took longer than {self._render_timeout_s:g} s")
            self._replace_child("a template took too long")

    def _take_first(self) -> _Job:
        job = self._sent.popleft()
        self._held_bytes -= job.num_bytes
        return job

    def _fail_first(self, message: str) -> None:
        if self._sent and not (job := self._take_first()).answer.done():
            job.answer.set_exception(InvalidRequest(message, job.param))

    def _fail_waiting(self, error: PdserveError) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            self._held_bytes -= job.num_bytes
            if not job.answer.done():
                job.answer.set_exception(error)

    def _replace_child(self, why: str) -> None:
        _log.info("template_child_replaced", pid=self.pid, reason=why, jobs=len(self._sent))
        self._drop_child()
        self._begin_start()

    def _drop_child(self) -> None:
        """Kill the process; the jobs sent to it return to the queue, in their order."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _begin_start(self) -> asyncio.Task[None]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        child = TemplateChild(self._on_answer, self._on_child_end)
        self._children = {child, *(other for other in self._children if not other.gone)}
        try:
            async with asyncio.timeout(_START_S):
                await child.start(self._render_s)
            self._child = child
        except (OSError, TimeoutError) as error:
            self._fail_waiting(Unavailable(f"the process that renders chat templates did not start: {error!r}"))
        finally:
            self._starting = None
            if self._child is not child:
                child.kill()
        self._send_waiting()
