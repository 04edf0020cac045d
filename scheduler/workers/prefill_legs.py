"""The prefill legs of prompts on a worker: it computes the prompt, and another worker generates the tokens.

If both legs run at once, the computation continues when the prompt is cancelled.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from scheduler.workers.answers import cached_tokens, prompt_logprobs
from scheduler.workers.http import WorkerHttp
from scheduler.workers.http_connection import Body
from scheduler.workers.legs import LEASE_S, WorkerRequest, headers_of, new_request_id, requests_of
from scheduler.workers.progress import Progress
from scheduler.workers.request_body import check_prompt, path_of, prefill_body, score_body, unfinished
from scheduler.workers.transfers import Transfer
from wire.errors import HandoffFailed, NoCapacity, PdserveError
from wire.messages import Event, HandedOff, PrefillBegun, PrefillHeld, Step
from wire.types import PromptState, StageTimes, Ticket

_T = TypeVar("_T")


class PrefillLegs:
    """Owner of the computations that continue after their prompts were cancelled. Its events are passed to `emit`."""

    def __init__(
        self, model: str, http: WorkerHttp, transfer: Transfer, progress: Progress, emit: Callable[[Event], None], *,
        max_abandoned_tokens: int, claim: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`max_abandoned_tokens`: while more tokens of cancelled prompts are computed, no new prompt is accepted.

        `claim` raises HandoffFailed for an engine id that another worker has.
        """
        self._model = model
        self._http = http
        self._transfer = transfer
        self._progress = progress
        self._emit = emit
        self._max_abandoned_tokens = max_abandoned_tokens
        self._claim = claim
        self._uncancelled: dict[asyncio.Task[Any], int] = {}  # prompt tokens; 0 while placement counts them

    @property
    def uncancelled(self) -> Collection[asyncio.Task[Any]]:
        """The computations that a cancelled prompt does not end."""
        return self._uncancelled.keys()

    async def hold(self, prompt: PromptState) -> None:
        """Compute the prompt; if decode can get its request meanwhile, first emit what decode needs.

        Decode cannot if log probabilities of the prompt are requested: they precede any token. Nor can it with several
        sequences: while one streams, nothing would show that another's KV never arrives.
        """
        check_prompt(prompt)
        if (abandoned := sum(self._uncancelled.values())) > self._max_abandoned_tokens:  # placement's limit too
            limit = f"but the limit is {self._max_abandoned_tokens}"
            raise NoCapacity(f"it still computes {abandoned} tokens of prompts that were cancelled, {limit}")
        transfer, ids = self._transfer, [new_request_id() for _ in unfinished(prompt)]
        await transfer.prepare()
        early = [WorkerRequest(one, transfer.early_reference(one), is_early=True) for one in ids]
        is_early = len(early) == 1 and early[0].params is not None and prompt.params.prompt_logprobs is None
        if is_early:
            self._claim_all(early)
        work = self._prefill(prompt, [WorkerRequest(one, transfer.prefill_leg(one)) for one in ids], LEASE_S)
        if is_early:
            self._emit(PrefillBegun(prompt.prompt_id, tuple(early), LEASE_S))
            work = self._to_its_end(work, len(prompt.token_ids))
        answers, times, began = await work
        held = [
            WorkerRequest(one, transfer.reference(one, answer), until=began + LEASE_S)
            for one, answer in zip(ids, answers, strict=True)
        ]
        if is_early:
            self._emit(HandedOff(prompt.prompt_id, times))
        else:
            self._claim_all(held)
            self._emit(PrefillHeld(prompt.prompt_id, tuple(held), LEASE_S, times))

    def _claim_all(self, references: Sequence[WorkerRequest]) -> None:
        for one in references:
            self._claim((one.params or {})["remote_engine_id"])

    async def send(self, prompt: PromptState, ticket: Ticket) -> None:
        """Compute the prompt for the decode worker that called back.

        It is always accepted: decode holds blocks for it, which also limit how many such prompts there are.
        """
        check_prompt(prompt)
        work = self._prefill(prompt, requests_of(ticket))
        _, times, _ = await self._to_its_end(work, len(prompt.token_ids))
        self._emit(HandedOff(prompt.prompt_id, times))

    async def score(self, prompt: PromptState) -> dict[str, Any] | None:
        """Compute the prompt for its log probabilities alone; None if they are not requested, or already known."""
        if prompt.params.prompt_logprobs is None or prompt.outputs:
            return None
        answer = await self._post(prompt, score_body(self._model, prompt), new_request_id(), len(prompt.token_ids))
        self._emit(Step((), None, prompt_logprobs=(prompt_logprobs(answer, prompt),)))
        return answer

    async def _to_its_end(self, work: Coroutine[Any, Any, _T], num_tokens: int) -> _T:
        """Finish the work even if the prompt is cancelled; only the end of the session cancels it.

        Decode keeps the blocks of a waiting request, cancelled or not, until its KV has arrived (vLLM 0.26 to 0.33,
        finish_requests of vllm.v1.core.sched.scheduler), and an aborted prefill never sends it.
        """
        task = self._start(work, 0)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task in self._uncancelled:
                self._uncancelled[task] = num_tokens
            raise

    def _start(self, work: Coroutine[Any, Any, _T], num_tokens: int) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._uncancelled[task] = num_tokens
        task.add_done_callback(self._uncancelled.pop)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _prefill(
        self, prompt: PromptState, requests: Sequence[WorkerRequest], lease_s: float | None = None
    ) -> tuple[list[dict[str, Any]], StageTimes, float]:
        """Compute the prompt once for each sequence that needs more tokens: the first alone, then the others.

        The worker holds the first one's KV for `lease_s` after its answer; the time of that answer is returned too.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            scored = await self.score(prompt)
        except PdserveError:
            if lease_s is None:  # decode waits already
                self._start(self._post_legs(prompt, requests, lease_s), len(prompt.token_ids))
            raise
        answers, answered_at = await self._post_legs(prompt, requests, lease_s)
        times = StageTimes(prefill_s=clock() - began, cached_tokens=cached_tokens(scored or answers[0]))
        return answers, times, answered_at

    async def _post_legs(
        self, prompt: PromptState, requests: Sequence[WorkerRequest], lease_s: float | None
    ) -> tuple[list[dict[str, Any]], float]:
        """Return the answers, and the time of the first one."""
        first, *others = zip(unfinished(prompt), requests, strict=True)
        answers = [await self._post_leg(prompt, *first, len(prompt.token_ids))]
        answered_at = asyncio.get_running_loop().time()
        if others:
            answers += await self._post_all(prompt, others, lease_s)
        return answers, answered_at

    async def _post_all(
        self, prompt: PromptState, others: Sequence[tuple[int, WorkerRequest]], lease_s: float | None
    ) -> list[dict[str, Any]]:
        """Compute the other sequences of a prompt that the worker has cached."""
        try:
            async with asyncio.timeout(lease_s), asyncio.TaskGroup() as tasks:
                posted = [tasks.create_task(self._post_leg(prompt, *one, 0)) for one in others]
        except TimeoutError:
            raise HandoffFailed("it did not compute all sequences while it held the first one's KV") from None
        return [one.result() for one in posted]

    async def _post_leg(
        self, prompt: PromptState, sequence: int, request: WorkerRequest, num_tokens: int
    ) -> dict[str, Any]:  # fmt: skip
        body = prefill_body(self._model, prompt, sequence, request.params)
        return await self._post(prompt, body, request.request_id, num_tokens)

    async def _post(self, prompt: PromptState, body: Body, request_id: str, num_tokens: int) -> dict[str, Any]:
        with self._progress.leg(num_tokens, has_images=prompt.chat is not None) as leg:
            answer = await self._http.post_json(path_of(prompt), body, headers_of(prompt, request_id))
            compiles = prompt.params.structured is not None  # which may have taken longer than the prompt
            leg.heard(num_tokens if compiles else cached_tokens(answer))
            return answer
