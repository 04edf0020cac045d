"""Run requests: queue, place, run a path, and end exactly once. READ FIRST in this package.

    start ----> admission ----> placement ----> path (handoff | local) ----> Running.events()
    accept      wait for room   choose a pair   reserve, prefill, step       the client reads

Each prompt of a request goes this way alone. A prompt whose pair fails before a token of its decode instance left is
tried once more, on another pair where there is one and as the budget of retries allows; one that finds no room after
all goes back to the front of the queue.
"""

import asyncio
import itertools
import math
from collections.abc import Callable

from scheduler.admission import Admission, Waiting
from scheduler.grants import Grant, Placer
from scheduler.ledger import Ledger
from scheduler.limits import ControlLimits
from scheduler.paths.handoff import HandoffPath
from scheduler.paths.local import LocalPath
from scheduler.placement import Plan
from scheduler.prompt_run import PromptRun
from scheduler.readiness import Readiness
from scheduler.registry import Registry
from scheduler.request import GenerationRequest, PromptDone
from scheduler.retry_budget import Retry, RetryBudget
from scheduler.running import Running
from telemetry.logs import EventLogger
from wire.errors import (
    Draining,
    HandoffFailed,
    InstanceLost,
    InternalError,
    NoCapacity,
    Overloaded,
    PdserveError,
    Unavailable,
)
from wire.types import StageTimes

log = EventLogger("dispatch")

RETRYABLE = (InstanceLost, HandoffFailed, Draining, InternalError)


class Dispatch:
    """Owns the requests under way. Implements scheduler.request.Dispatcher."""

    def __init__(self, registry: Registry, readiness: Readiness, limits: ControlLimits, *, id_prefix: str) -> None:
        self.ledger = Ledger()
        self._placer = Placer(registry)
        self.retries = RetryBudget(limits, lambda: self.ledger.inflight)
        self.admission = Admission(limits, self._placer.try_place)
        self._registry = registry
        self._readiness = readiness
        self._limits = limits
        self._ids = itertools.count()
        self._id_prefix = id_prefix
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        registry.on_change(self.admission.pump)

    def start(self, request: GenerationRequest) -> Running:
        """Take a request. Raises Overloaded, Unavailable without a path, Draining while shutting down."""
        self._check_can_start(request)
        self.ledger.received += 1
        running = Running()
        prompts = [self._new_prompt(request, index, running) for index in range(len(request.prompts))]
        places = {prompt: Waiting(prompt.prompt_id, prompt.facts, turn) for turn, prompt in enumerate(prompts)}
        task = asyncio.create_task(self._run(prompts, places, running))
        running.bind(cancel=_canceller(task), stop=lambda prompt, sequence: prompts[prompt].stop(sequence))
        task.add_done_callback(lambda done: self._ended(done, request, places, running))
        self._tasks.add(task)
        for waiting in places.values():
            self.admission.enter(waiting)
        return running

    async def probe(self, request: GenerationRequest, plan: Plan) -> None:
        """Run a one-prompt request over this very plan, past the queue and the ledger. Raises what failed it."""
        prompt = self._new_prompt(request, 0, Running())
        await self._run_path(prompt, self._placer.grant(prompt.prompt_id, plan))

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give those under way `drain_s` to end, then cancel them."""
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
            if not self._registry.has_path():
                missing = ", ".join(f"{missing.role} instance {missing.index}" for missing in self._registry.missing())
                raise Unavailable(f"no path can serve this now; missing: {missing}")
            self.admission.check_room(len(request.prompts), sum(map(len, request.prompts)))
        except (Overloaded, Unavailable):
            self.ledger.rejected += 1
            raise

    def _new_prompt(self, request: GenerationRequest, index: int, running: Running) -> PromptRun:
        return PromptRun(request, index, lambda: f"{self._id_prefix}.{next(self._ids)}", running.put)

    async def _run(self, prompts: list[PromptRun], places: dict[PromptRun, Waiting], running: Running) -> None:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(self._serve(prompt, places, running))

    async def _serve(self, prompt: PromptRun, places: dict[PromptRun, Waiting], running: Running) -> None:
        """Take one prompt from the queue to its end.

        Only failures count as tries. An instance without room after all is asked again after its next load, until the
        prompt's limit; where the first token is out, that limit does not start anew with every refusal.
        """
        failure: PdserveError | None = None
        num_failures, stalls_at = 0, math.inf
        with self.retries.retry() as retry:
            while True:
                grant = await self._wait_for_grant(prompt, places[prompt], failure)
                try:
                    with grant:
                        await self._run_path(prompt, grant, retry)
                    running.put(_done(prompt, grant))
                    return
                except NoCapacity as error:
                    if not prompt.can_be_retried:
                        raise
                    log.debug("no_capacity", request_id=prompt.request.request_id, reason=error)
                    stalls_at = min(stalls_at, prompt.deadline) if prompt.output.started else math.inf
                    if asyncio.get_running_loop().time() >= min(stalls_at, prompt.deadline):
                        raise prompt.deadline_error() from error
                except RETRYABLE as error:
                    num_failures += 1
                    if not prompt.can_be_retried or num_failures >= self._limits.max_tries:
                        raise
                    failure, stalls_at = error, math.inf
                    self._note_retry(prompt, grant.plan, error)
                    await self._wait_for_retry(prompt, retry)
                self._requeue(prompt, places)

    async def _wait_for_retry(self, prompt: PromptRun, retry: Retry) -> None:
        """Wait until the cluster's budget has room for a retry, as long as the prompt's own limit allows."""
        retry.done()
        if self.retries.is_spent:
            self.ledger.delayed_retries += 1
            under_way, limit = self.retries.num_under_way, self.retries.limit
            prompt.enter(f"waiting to be retried while {under_way} others are (the limit is {limit})")
        try:
            async with asyncio.timeout_at(prompt.deadline):
                await retry.begin()
        except TimeoutError:
            raise prompt.deadline_error() from None

    async def _wait_for_grant(self, prompt: PromptRun, waiting: Waiting, failure: PdserveError | None) -> Grant:
        """Wait in the queue. When no pair is left to try, what failed the last one is raised."""
        try:
            async with asyncio.timeout_at(prompt.deadline):
                grant = await waiting.grant
        except TimeoutError:
            prompt.stage += f": {self._placer.why_waiting(waiting.facts) or 'others are before it'}"
            raise prompt.deadline_error() from None
        except Unavailable as error:
            raise (failure or error) from None
        prompt.add_times(StageTimes(queue_s=prompt.enter("placed")))
        return grant

    async def _run_path(self, prompt: PromptRun, grant: Grant, retry: Retry | None = None) -> None:
        def crossed() -> None:
            self._readiness.crossed(grant.plan)
            if retry is not None:
                retry.done()

        if grant.prefill is None:
            await LocalPath(grant.decode, crossed=crossed).run(prompt)
        else:
            path = HandoffPath(grant.prefill, grant.decode, limits=self._limits, crossed=crossed)
            await path.run(prompt)

    def _requeue(self, prompt: PromptRun, places: dict[PromptRun, Waiting]) -> None:
        prompt.begin_attempt()
        passed = places[prompt].passed  # a prompt refused after all is not passed for ever either
        places[prompt] = Waiting(prompt.prompt_id, prompt.facts)
        places[prompt].passed = passed
        self.admission.enter(places[prompt], front=True)

    def _note_retry(self, prompt: PromptRun, plan: Plan, error: PdserveError) -> None:
        prompt.avoid |= {plan.pair}
        self.ledger.retried_prompts += 1
        log.warning("prompt_retried", request_id=prompt.request.request_id, plan=plan.reason, reason=error)

    def _ended(
        self, task: asyncio.Task[None], request: GenerationRequest, places: dict[PromptRun, Waiting], running: Running
    ) -> None:
        """The one place where a request ends: the queue forgets it, the ledger counts it, the client hears it."""
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
        log.warning("request_failed", request_id=request.request_id, error=type(reason).__name__, reason=reason)
        running.finish(reason)


def _canceller(task: asyncio.Task[None]) -> Callable[[], None]:
    def cancel() -> None:
        task.cancel()

    return cancel


def _done(prompt: PromptRun, grant: Grant) -> PromptDone:
    return PromptDone(
        prompt=prompt.prompt,
        path=grant.plan.path,
        reason=grant.plan.reason,
        prefill_instance=None if grant.prefill is None else grant.prefill.description.instance_id,
        decode_instance=grant.decode.description.instance_id,
        times=prompt.times,
    )


def _reason(error: BaseException, request: GenerationRequest) -> PdserveError:
    """Return the error to tell the client: the first of ours among the prompts', else InternalError."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if isinstance(inner, PdserveError):
                return inner
    log.error("request_broke", exc=error, request_id=request.request_id)
    return InternalError(f"request {request.request_id} failed; details are in the scheduler's log")
