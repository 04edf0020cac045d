"""The tries of one prompt: wait for a grant, run its path, and after a failure or a refusal go back to the queue."""

import asyncio
import math

from scheduler.admission import Admission
from scheduler.grants import Grant, Placer
from scheduler.limits import ControlLimits
from scheduler.observability.finished_requests import FinishedRequests
from scheduler.paths.handoff import HandoffPath
from scheduler.paths.local import LocalPath
from scheduler.paths.pooling import PoolingPath
from scheduler.placement import Plan
from scheduler.prompt_run import AllEnded, PromptRun
from scheduler.queue.waiting import Waiting
from scheduler.readiness import Readiness
from scheduler.request import PromptDone
from scheduler.retry_budget import Retry, RetryBudget
from telemetry.logs import EventLogger
from wire.errors import (
    Draining,
    HandoffFailed,
    InstanceLost,
    InternalError,
    NoCapacity,
    PdserveError,
    Unavailable,
)
from wire.types import Role, StageTimes

log = EventLogger("dispatch")

RETRYABLE = (InstanceLost, HandoffFailed, Draining, InternalError)


class Attempts:
    """Takes prompts from the queue to their end; what it counts stands in the dispatch's ledger."""

    def __init__(
        self, limits: ControlLimits, placer: Placer, admission: Admission, readiness: Readiness, retries: RetryBudget,
        ledger: FinishedRequests,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._placer = placer
        self._admission = admission
        self._readiness = readiness
        self._retries = retries
        self._ledger = ledger

    async def serve(self, prompt: PromptRun, places: dict[PromptRun, Waiting]) -> PromptDone:
        """Take one prompt, which waits at its place in the queue, to its end. Raises what failed it.

        A new try goes on from the tokens that left already. Only failures count as tries: an instance without room
        after all is asked again after its next load, until the prompt's limit; where the first token is out, that limit
        does not start anew with every refusal.
        """
        failure: PdserveError | None = None
        num_failures, stalls_at = 0, math.inf
        with self._retries.retry() as retry:
            grant = await self._wait_for_grant(prompt, places[prompt], None)
            while True:
                has_failed = False
                try:
                    with grant:
                        await self.run_path(prompt, grant, retry)
                        grant.finished(prompt.chains)
                    return _done(prompt, grant, tries=num_failures + 1)
                except NoCapacity as error:
                    log.debug("no_capacity", request_id=prompt.request.request_id, reason=error)
                    stalls_at = min(stalls_at, prompt.deadline) if prompt.output.started else math.inf
                    if asyncio.get_running_loop().time() >= min(stalls_at, prompt.deadline):
                        raise prompt.deadline_error() from error
                except RETRYABLE as error:
                    num_failures += 1
                    if num_failures >= self._limits.max_tries:
                        raise
                    failure, stalls_at, has_failed = error, math.inf, True
                    self._note_retry(prompt, grant.plan, error)
                try:
                    grant = await self._grant_again(prompt, places, retry, failure, has_failed=has_failed)
                except AllEnded:
                    return _done(prompt, grant, tries=max(1, num_failures))

    async def _grant_again(
        self, prompt: PromptRun, places: dict[PromptRun, Waiting], retry: Retry, failure: PdserveError | None, *,
        has_failed: bool,
    ) -> Grant:  # fmt: skip
        """Go back to the queue, a prompt that failed as the budget allows. Raises AllEnded, with no place there."""
        if has_failed:
            with prompt.wanted(retry.give_up):
                await self._wait_for_retry(prompt, retry)
        self._requeue(prompt, places)
        waiting = places[prompt]
        try:
            with prompt.wanted(waiting.grant.cancel):
                grant = await self._wait_for_grant(prompt, waiting, failure)
        except AllEnded:
            self._admission.leave(waiting)
            raise
        retry.placed()
        return grant

    async def run_path(self, prompt: PromptRun, grant: Grant, retry: Retry | None = None) -> None:
        """Run the granted plan once. Raises what failed it."""

        def succeeded() -> None:
            if retry is not None:
                retry.done()

        def crossed() -> None:
            self._readiness.crossed(grant.plan)
            succeeded()

        if prompt.state.pooling is not None:
            await PoolingPath(grant.decode, answered=crossed).run(prompt)
        elif grant.prefill is None:
            is_whole = grant.decode.role is Role.COMBINED  # else nothing crossed to where tokens are decoded
            await LocalPath(grant.decode, crossed=crossed if is_whole else succeeded).run(prompt)
        else:
            path = HandoffPath(grant.prefill, grant.decode, limits=self._limits, crossed=crossed)
            await path.run(prompt)

    async def _wait_for_grant(self, prompt: PromptRun, waiting: Waiting, failure: PdserveError | None) -> Grant:
        """Wait in the queue. When no pair is left to try, what failed the last one is raised."""
        try:
            if waiting.grant.done():  # as where nobody waits before it: no timer then
                grant = await waiting.grant
            else:
                async with asyncio.timeout_at(prompt.deadline):
                    grant = await waiting.grant
        except TimeoutError:
            prompt.stage += f": {self._placer.why_waiting(waiting.facts) or 'others are before it'}"
            raise prompt.deadline_error() from None
        except Unavailable as error:
            raise (failure or error) from None
        prompt.add_times(StageTimes(queue_s=prompt.enter("placed")))
        return grant

    async def _wait_for_retry(self, prompt: PromptRun, retry: Retry) -> None:
        """Wait until the cluster's budget has room for a retry, as long as the prompt's own limit allows."""
        retry.done()
        if self._retries.is_spent:
            self._ledger.delayed_retries += 1
            under_way, limit = self._retries.num_under_way, self._retries.limit
            prompt.enter(f"waiting to be retried while {under_way} others are (the limit is {limit})")
        try:
            async with asyncio.timeout_at(prompt.deadline):
                await retry.begin()
        except TimeoutError:
            raise prompt.deadline_error() from None

    def _note_retry(self, prompt: PromptRun, plan: Plan, error: PdserveError) -> None:
        prompt.avoid |= {plan.pair}
        self._ledger.retried_prompts += 1
        log.warning("prompt_retried", request_id=prompt.request.request_id, plan=plan.reason, reason=error)

    def _requeue(self, prompt: PromptRun, places: dict[PromptRun, Waiting]) -> None:
        prompt.begin_attempt()
        passed = places[prompt].passed  # a prompt refused after all is not passed for ever either
        places[prompt] = prompt.waiting()
        places[prompt].passed = passed
        self._admission.enter(places[prompt], front=True)


def _done(prompt: PromptRun, grant: Grant, *, tries: int) -> PromptDone:
    return PromptDone(
        prompt=prompt.prompt,
        path=grant.plan.path,
        reason=grant.plan.reason,
        prefill_instance=None if grant.prefill is None else grant.prefill.description.instance_id,
        decode_instance=grant.decode.description.instance_id,
        times=prompt.times,
        tries=tries,
    )
