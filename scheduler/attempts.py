"""The attempts of one prompt: wait for a grant, run its path, and after a failure or a refusal queue again."""

import asyncio
import math

from scheduler.admission import Admission
from scheduler.adoption import Adoption
from scheduler.finished_requests import FinishedRequests
from scheduler.grants import Grant, Placer
from scheduler.limits import ControlLimits
from scheduler.paths.handoff import HandoffPath
from scheduler.paths.local import LocalPath
from scheduler.paths.pooling import PoolingPath
from scheduler.paths.prefill_first import PrefillFirstPath
from scheduler.placement import Plan
from scheduler.prompt_run import PromptRun
from scheduler.readiness import Readiness
from scheduler.request import PromptDone
from scheduler.retry_budget import Retry, RetryBudget
from scheduler.stream_finder import StreamFinder
from scheduler.workers.connectors import AT_ONCE, PREFILL_FIRST
from telemetry.logs import EventLogger
from wire.errors import (
    Draining,
    HandoffFailed,
    InstanceLost,
    InternalError,
    NoCapacity,
    OutputDiffers,
    PdserveError,
    Unavailable,
)
from wire.types import Role

_log = EventLogger("dispatch")

RETRYABLE = (InstanceLost, HandoffFailed, OutputDiffers, Draining, InternalError)


class Attempts:
    """Runs queued prompts to their end; updates the dispatch's ledger."""

    def __init__(
        self, limits: ControlLimits, placer: Placer, admission: Admission, readiness: Readiness, retries: RetryBudget,
        ledger: FinishedRequests, finder: StreamFinder,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._placer = placer
        self._admission = admission
        self._readiness = readiness
        self._retries = retries
        self._ledger = ledger
        self._finder = finder

    async def serve(self, prompt: PromptRun, adoption: Adoption | None = None) -> PromptDone:
        """Run one queued prompt, or one that was adopted, to its end. Raises the error that failed it.

        A new attempt continues from the tokens already sent. Only failures count as attempts: an instance that turns
        out to have no room is tried again after its next load, until the prompt's deadline; after the first token,
        refusals do not extend that deadline, only new tokens do.
        """
        failure: PdserveError | None = None
        num_failures, num_tokens, stalls_at = 0, 0, math.inf
        with self._retries.retry() as retry:
            grant = await self._wait_for_grant(prompt, None) if adoption is None else Grant.of_adopted(adoption)
            clock = asyncio.get_running_loop().time
            while True:
                began = clock()
                try:
                    with grant:
                        gone = _role_gone(prompt, grant)
                        await self.run_path(prompt, grant, retry)
                        grant.finished(prompt.chains)
                        self._placer.note_times(prompt.times)
                    self._ledger.serve_without(gone)
                    return _prompt_done(prompt, grant, tries=num_failures + 1, seconds=clock() - began)
                except NoCapacity as error:
                    _log.debug("no_capacity", request_id=prompt.request.request_id, error=error)
                    if prompt.output.num_tokens > num_tokens:
                        num_tokens, stalls_at = prompt.output.num_tokens, prompt.deadline
                        self._ledger.retried_tokens += prompt.num_tokens
                    elif prompt.output.started:
                        stalls_at = min(stalls_at, prompt.deadline)
                    if clock() >= min(stalls_at, prompt.deadline):
                        raise prompt.deadline_error() from error
                except RETRYABLE as error:
                    if isinstance(error, InstanceLost) and (found := await self._finder.reclaim(prompt)) is not None:
                        grant = Grant.of_adopted(found)
                        continue
                    if grant.plan.pair not in prompt.avoid:  # else this prompt has failed there before
                        self._readiness.note_failure(grant.plan)
                    num_failures += 1
                    self._ledger.differing_outputs += isinstance(error, OutputDiffers)
                    if num_failures >= self._limits.max_tries:
                        raise
                    failure, stalls_at = error, math.inf
                    self._note_retry(prompt, grant.plan, error)
                    await self._wait_for_retry(prompt, retry)
                self._admission.enter(prompt.requeue(), front=True)
                grant = await self._wait_for_grant(prompt, failure)
                retry.placed()

    async def run_path(self, prompt: PromptRun, grant: Grant, retry: Retry | None = None) -> None:
        """Run the granted plan once. Raises the error that failed it."""

        def succeeded() -> None:
            if retry is not None:
                retry.done()

        def pair_used() -> None:
            self._readiness.note_use(grant.plan)
            succeeded()

        if prompt.state.pooling is not None:
            await PoolingPath(grant.decode, on_output=pair_used).run(prompt)
        elif grant.prefill is None:
            is_whole = grant.decode.role is Role.COMBINED  # else no decode instance was reached
            on_output = pair_used if is_whole else succeeded
            await LocalPath(grant.decode, on_output=on_output, adoption=grant.adoption).run(prompt)
        elif grant.plan.path in (PREFILL_FIRST, AT_ONCE):
            await PrefillFirstPath(prompt, grant.prefill, grant.decode, on_output=pair_used).run()
        else:
            path = HandoffPath(prompt, grant.prefill, grant.decode, limits=self._limits, on_output=pair_used)
            await path.run()

    async def _wait_for_grant(self, prompt: PromptRun, failure: PdserveError | None) -> Grant:
        """Wait in the queue. When no pair is left to try, raise the last failure."""
        entry = prompt.queue_entry
        try:
            if entry.grant.done():  # common when the queue is empty: needs no timer
                grant = await entry.grant
            else:
                async with asyncio.timeout_at(prompt.deadline):
                    grant = await entry.grant
        except TimeoutError:
            prompt.stage += f": {self._placer.why_waiting(entry.facts) or 'others are ahead of it'}"
            raise prompt.deadline_error() from None
        except Unavailable as error:
            raise (failure or error) from None
        prompt.add_time("queue_s", prompt.enter("placed"))
        return grant

    async def _wait_for_retry(self, prompt: PromptRun, retry: Retry) -> None:
        """Wait until the cluster's retry budget has room, at most until the prompt's deadline."""
        retry.done()
        if self._retries.is_spent:
            self._ledger.delayed_retries += 1
            under_way, limit = self._retries.num_under_way, self._retries.limit
            running = f"{under_way} retr{'y is' if under_way == 1 else 'ies are'} running"
            prompt.enter(f"waiting to be retried: {running} (limit {limit})")
        try:
            async with asyncio.timeout_at(prompt.deadline):
                await retry.begin()
        except TimeoutError:
            raise prompt.deadline_error() from None

    def _note_retry(self, prompt: PromptRun, plan: Plan, error: PdserveError) -> None:
        prompt.avoid |= {plan.pair}
        self._ledger.retried_prompts += 1
        self._ledger.retried_tokens += prompt.num_tokens
        _log.warning("prompt_retried", request_id=prompt.request.request_id, plan=plan.reason, error=error)


def _role_gone(prompt: PromptRun, grant: Grant) -> Role | None:
    """Return the role whose instances are gone, if this is why the prompt runs on one instance alone."""
    gone = grant.decode.serves_without
    would_stay = prompt.request.prefill_only and gone is Role.DECODE
    return None if grant.prefill is not None or grant.adoption is not None or would_stay else gone


def _prompt_done(prompt: PromptRun, grant: Grant, *, tries: int, seconds: float) -> PromptDone:
    return PromptDone(
        prompt_index=prompt.index,
        path=grant.plan.path,
        reason=grant.plan.reason,
        prefill_instance=None if grant.prefill is None else grant.prefill.description.instance_id,
        decode_instance=grant.decode.description.instance_id,
        times=prompt.times,
        tries=tries,
        seconds=seconds,
        expected_s=grant.plan.expected_s,
    )
