"""Run requests: queue, place, run a path, and finish exactly once. READ FIRST in this package.

    start ----> admission ----> placement ----> path (handoff | local) ----> Running.events()
    accept      wait for room   choose a pair   reserve, prefill, step       the client reads

Each prompt of a request goes through these steps on its own (attempts.py). If its pair fails, it is retried, on another
pair if there is one and as the retry budget allows, from the tokens already sent; if the instance turns out to have no
room, it returns to the front of the queue.
"""

import asyncio
import itertools
from collections.abc import Callable

from scheduler.admission import Admission
from scheduler.attempts import Attempts
from scheduler.grants import Placer
from scheduler.limits import ControlLimits
from scheduler.observability.finished_requests import FinishedRequests
from scheduler.observability.request_log import without_values
from scheduler.placement import Plan
from scheduler.prompt_run import PromptRun
from scheduler.queue.waiting import Waiting
from scheduler.readiness import Readiness
from scheduler.registry import Registry
from scheduler.request import GenerationRequest
from scheduler.request_check import check_request
from scheduler.retry_budget import RetryBudget
from scheduler.running import Running
from telemetry.logs import EventLogger
from wire.errors import Draining, InternalError, InvalidRequest, Overloaded, PdserveError, Unavailable

log = EventLogger("dispatch")


class Dispatch:
    """Owner of the running requests. Implements scheduler.request.Dispatcher."""

    def __init__(self, registry: Registry, readiness: Readiness, limits: ControlLimits, *, id_prefix: str) -> None:
        self.ledger = FinishedRequests()
        self._placer = Placer(registry)
        self.admission = Admission(limits, self._placer)
        self.retries = RetryBudget(limits, lambda: self.ledger.inflight, lambda: not self.admission.num_waiting)
        self._registry = registry
        self._tries = Attempts(limits, self._placer, self.admission, readiness, self.retries, self.ledger)
        self._limits = limits
        self._ids = itertools.count()
        self._id_prefix = id_prefix
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        registry.on_change(self.admission.changed)

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if not even a one-token prompt may wait; `start` reports all other errors."""
        if self._draining or not self._registry.has_path():
            return
        try:
            self.admission.check_room(1, 1, tenant)
        except Overloaded:
            self.ledger.rejected += 1
            raise

    def start(self, request: GenerationRequest) -> Running:
        """Start a request.

        Raises InvalidRequest, Overloaded, Unavailable without a path, Draining while shutting down.
        """
        check_request(request)
        self._check_can_start(request)
        self.ledger.received += 1
        running = Running()
        prompts = [self._new_prompt(request, index, running) for index in range(len(request.prompts))]
        places = {prompt: prompt.waiting(turn) for turn, prompt in enumerate(prompts)}
        task = asyncio.create_task(self._run(prompts, places, running))
        running.bind(cancel=_canceller(task), stop=lambda prompt, sequence: prompts[prompt].stop(sequence))
        task.add_done_callback(lambda done: self._ended(done, request, places, running))
        self._tasks.add(task)
        for waiting in places.values():
            self.admission.enter(waiting)
        return running

    async def probe(self, request: GenerationRequest, plan: Plan) -> None:
        """Run a one-prompt request on exactly this plan, bypassing queue and ledger. Raises the error that ended it."""
        prompt = self._new_prompt(request, 0, Running())
        with self._placer.grant(prompt.prompt_id, plan) as grant:
            await self._tries.run_path(prompt, grant)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give running ones `drain_s` to finish, then cancel them."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.settle_s)

    def _check_can_start(self, request: GenerationRequest) -> None:
        try:
            if self._draining:
                raise Draining("the scheduler is shutting down")
            if not (self._registry.has_path(stays=request.stays) or self._registry.awaits_path()):
                raise self._registry.no_path()
            self.admission.check_room(len(request.prompts), sum(map(len, request.prompts)), request.tenant)
        except (Overloaded, Unavailable):
            self.ledger.rejected += 1
            raise

    def _new_prompt(self, request: GenerationRequest, index: int, running: Running) -> PromptRun:
        return PromptRun(request, index, lambda: f"{self._id_prefix}.{next(self._ids)}", running.put)

    async def _run(self, prompts: list[PromptRun], places: dict[PromptRun, Waiting], running: Running) -> None:
        if len(prompts) == 1:
            await self._serve(prompts[0], places, running)
            return
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(self._serve(prompt, places, running))

    async def _serve(self, prompt: PromptRun, places: dict[PromptRun, Waiting], running: Running) -> None:
        try:
            running.put(await self._tries.serve(prompt, places))
        finally:
            if prompt.output.started:
                self.admission.costs.ended(prompt.request.tenant, prompt.facts, prompt.output.num_tokens)

    def _ended(
        self, task: asyncio.Task[None], request: GenerationRequest, places: dict[PromptRun, Waiting], running: Running
    ) -> None:
        """Finish a request, the only place for that: clear the queue, update the ledger, inform the client."""
        self._tasks.discard(task)
        for waiting in places.values():
            self.admission.leave(waiting)
        if task.cancelled():
            self.ledger.cancelled += 1
            running.finish(Draining("the scheduler is shutting down"))
            return
        error = task.exception()
        if error is None:
            self.ledger.completed += 1
            running.finish(None)
            return
        self.ledger.failed += 1
        reason = _reason(error, request)
        report = log.debug if isinstance(reason, InvalidRequest) else log.warning  # clients can cause many of these
        name = type(reason).__name__
        report("request_failed", request_id=request.request_id, error=name, reason=without_values(reason))
        running.finish(reason)


def _canceller(task: asyncio.Task[None]) -> Callable[[], None]:
    def cancel() -> None:
        task.cancel()

    return cancel


def _reason(error: BaseException, request: GenerationRequest) -> PdserveError:
    """Return the error for the client: the first PdserveError among the prompts', else InternalError."""
    if isinstance(error, PdserveError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if isinstance(inner, PdserveError):
                return inner
    log.error("request_broke", exc=error, request_id=request.request_id)
    return InternalError(f"request {request.request_id} failed; details are in the scheduler's log")
