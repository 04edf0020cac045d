"""Run requests: queue, place, run a path, and finish exactly once. READ FIRST in this package.

    run ------> admission ----> placement ----> path (see paths/) ---------> TokenSink.emit
    accept      wait for room   choose a pair   reserve, prefill, step       each token, as it arrives

Each prompt of a request goes through these steps on its own (attempts.py). If its pair fails, it is retried, on another
pair if there is one and as the retry budget allows, from the tokens already sent; if the instance turns out to have no
room, it returns to the front of the queue.
"""

import asyncio
import itertools

from scheduler.admission import Admission
from scheduler.adoption import Adoption
from scheduler.attempts import Attempts
from scheduler.finished_requests import FinishedRequests
from scheduler.grants import Placer
from scheduler.limits import ControlLimits
from scheduler.observability.request_log import without_values
from scheduler.placement import Plan
from scheduler.prompt_run import PromptRun, SinkFailed
from scheduler.readiness import Readiness
from scheduler.registry import Registry
from scheduler.request import GenerationRequest, TokenSink
from scheduler.request_check import check_request
from scheduler.request_class import UNCLASSED, RequestClass
from scheduler.retry_budget import RetryBudget
from scheduler.stream_finder import StreamFinder
from telemetry.logs import EventLogger
from wire.errors import Draining, InternalError, InvalidRequest, Overloaded, PdserveError, StreamMoved, Unavailable

_log = EventLogger("dispatch")


class Dispatch:
    """Owner of the running requests. Implements scheduler.request.Dispatcher."""

    def __init__(self, registry: Registry, readiness: Readiness, limits: ControlLimits, *, id_prefix: str) -> None:
        self.ledger = FinishedRequests()
        self.placer = Placer(registry, compares=limits.compare_paths)
        self.admission = Admission(limits, self.placer)
        self.retries = RetryBudget(limits, lambda: self.ledger.inflight, lambda: not self.admission.num_waiting)
        self._registry = registry
        finder = StreamFinder(registry, limits)
        self.adopt = finder.adopt
        self._attempts = Attempts(limits, self.placer, self.admission, readiness, self.retries, self.ledger, finder)
        self._limits = limits
        self._ids = itertools.count()
        self._id_prefix = id_prefix
        self._running: set[asyncio.Task[None]] = set()
        self._ended: set[asyncio.Task[None]] = set()  # by `close`
        self._none_running = asyncio.Event()
        self._draining = False
        registry.on_change(self.admission.changed)

    def check_room(self, tenant: str, request_class: RequestClass = UNCLASSED) -> None:
        """Raise Overloaded if not even a one-token prompt may wait; `run` reports all other errors."""
        try:
            self.admission.check_room(1, 1, tenant, request_class)
        except Overloaded as error:
            if self._draining or not self._registry.has_path():
                return
            self.ledger.reject(error)
            raise

    async def run(self, request: GenerationRequest, sink: TokenSink) -> None:
        """Run a request to its end; it is queued before the first await. Cancelling this call cancels it everywhere.

        Raises InvalidRequest, Overloaded, Unavailable without a path, Draining while shutting down, or the error that
        failed the request.
        """
        check_request(request)
        self._check_can_start(request)
        prompts = [PromptRun(request, index, sink, self._new_id) for index in range(len(request.prompts))]
        await self._run_accepted(request, prompts, sink)

    @property
    def has_workers(self) -> bool:
        """Whether workers of other engines, which keep no streams, may get requests."""
        return any(member.expected.is_worker for member in self._registry.members)

    async def resume(self, adoption: Adoption, request: GenerationRequest, sink: TokenSink) -> None:
        """Run the request of an adopted stream from its first token on. Raises the error that failed it."""
        if self._draining:
            raise Draining("the scheduler is shutting down")
        await self._run_accepted(request, [PromptRun(request, 0, sink, self._new_id)], sink, adoption)

    async def probe(self, request: GenerationRequest, plan: Plan, sink: TokenSink) -> None:
        """Run a one-prompt request on exactly this plan, bypassing queue and ledger. Raises the error that ended it."""
        prompt = PromptRun(request, 0, sink, self._new_id)
        with self.placer.grant(prompt.prompt_id, plan) as grant:
            await self._attempts.run_path(prompt, grant)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give running ones `drain_s` to finish, then end them with Draining."""
        self._draining = True
        await self._wait_for_all(drain_s)
        for task in self._running - self._ended:
            task.cancel()
        self._ended |= self._running
        await self._wait_for_all(self._limits.settle_s)

    async def _wait_for_all(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    self._none_running.clear()
                    await self._none_running.wait()
        except TimeoutError:
            return

    def _check_can_start(self, request: GenerationRequest) -> None:
        try:
            if self._draining:
                raise Draining("the scheduler is shutting down")
            if not (self._registry.has_path(prefill_only=request.prefill_only) or self._registry.awaits_path()):
                raise self._registry.no_path()
            num_tokens = sum(map(len, request.prompts))
            self.admission.check_room(len(request.prompts), num_tokens, request.tenant, request.request_class)
        except (Overloaded, Unavailable) as error:
            self.ledger.reject(error)
            raise

    async def _run_accepted(
        self, request: GenerationRequest, prompts: list[PromptRun], sink: TokenSink, adoption: Adoption | None = None
    ) -> None:
        """Run an accepted request; count it and its outcome, which nothing else does. `close` ends it with Draining."""
        self.ledger.received += 1
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if adoption is None:
                await self._serve_all(prompts, sink)
            else:
                await self._serve(prompts[0], sink, adoption)
        except StreamMoved:
            self.ledger.cancelled += 1
            raise
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            self.ledger.failed += 1
            raise _reason(error, request) from None
        except asyncio.CancelledError:
            self.ledger.cancelled += 1
            if task in self._ended and task.uncancel() == 0:
                raise Draining("the scheduler is shutting down") from None
            raise
        else:
            self.ledger.completed += 1
        finally:
            self._running.discard(task)
            if not self._running:
                self._none_running.set()

    async def _serve_all(self, prompts: list[PromptRun], sink: TokenSink) -> None:
        try:
            for prompt in prompts:
                self.admission.enter(prompt.queue_entry)
            if len(prompts) == 1:
                await self._serve(prompts[0], sink)
                return
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    tasks.create_task(self._serve(prompt, sink))
        finally:
            for prompt in prompts:
                self.admission.leave(prompt.queue_entry)

    async def _serve(self, prompt: PromptRun, sink: TokenSink, adoption: Adoption | None = None) -> None:
        try:
            done = await self._attempts.serve(prompt, adoption)
        finally:
            if prompt.output.started:
                entry = prompt.queue_entry
                self.admission.costs.ended(entry.tenant, entry.facts, prompt.output.num_tokens)
        sink.prompt_done(done)

    def _new_id(self) -> str:
        return f"{self._id_prefix}.{next(self._ids)}"


def _reason(error: Exception, request: GenerationRequest) -> PdserveError:
    """Log and return the error for the client: the first PdserveError among the prompts', else InternalError."""
    reason = next((one for one in _single_errors(error) if isinstance(one, PdserveError)), None)
    if reason is None:
        _log.error("request_failed_internally", error, request_id=request.request_id)
        reason = InternalError(f"request {request.request_id} failed; details are in the scheduler's log")
    report = _log.debug if isinstance(reason, InvalidRequest) else _log.warning  # clients can cause many of these
    name = type(reason).__name__
    report("request_failed", request_id=request.request_id, error=name, message=without_values(reason))
    return reason


def _single_errors(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _single_errors(inner)]
    return [error.error] if isinstance(error, SinkFailed) else [error]
