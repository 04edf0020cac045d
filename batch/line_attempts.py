"""Send one line until it has its answer, or its error."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from batch.backend import Answer, BatchBackend
from batch.inflight import Inflight
from batch.job import BatchStopped, RetryPolicy
from batch.lines import parse_line
from batch.output_line import LineOutcome, answered, failed, message_of, new_request_id, warnings_of
from batch.request_line import LineRefused, LineRequest, request_of
from remote_files.retry_after import retry_after_s
from telemetry.capped_logs import CappedLog
from wire.errors import DeadlineExceeded, PdserveError, Unavailable

_BUSY = frozenset({429, 529})
_TEMPORARY = _BUSY | {408, 502, 503, 504}
"""Statuses that the line did not cause, so that the line is retried."""
_PROBES = ("/health", "/ready")
_PROBE_S = 30.0


class LineAttempts:
    """Sends lines with one retry policy, as many at once as `inflight` allows; lines that wait for a retry do not
    count. `rng` adds jitter to the waits, `log` reports retries.
    """

    def __init__(
        self, backend: BatchBackend, retries: RetryPolicy, inflight: Inflight, rng: random.Random, log: CappedLog
    ) -> None:  # fmt: skip
        self._backend = backend
        self._inflight = inflight
        self._retries = retries
        self._rng = rng
        self._log = log

    async def send(self, content: bytes) -> LineOutcome:
        """Return the outcome of one line of the input.

        Raises BatchStopped if the server is at fault, not the line: the server is down, or refuses the key.
        """
        line = parse_line(content)
        custom_id, request_id = line["custom_id"], new_request_id()
        try:
            request = request_of(line)
        except LineRefused as refusal:
            return failed(custom_id, request_id, 400, str(refusal), refusal.param)
        try:
            answer = await self._retry(request, {"x-request-id": request_id})
            return replace(answered(custom_id, request_id, request.path, answer), warnings=warnings_of(answer))
        except Unavailable as error:
            return failed(custom_id, request_id, 503, str(error))
        except DeadlineExceeded as hung:
            return failed(custom_id, request_id, 504, str(hung))

    async def _retry(self, request: LineRequest, headers: Mapping[str, str]) -> Answer:
        """Send until the answer has no temporary status, or the tries are used up.

        Raises Unavailable, and DeadlineExceeded for a line that hangs.
        """
        failures = busy = 0
        while True:
            answer, lost = await self._attempt(request, headers)
            if answer is not None and answer.status not in _TEMPORARY:
                return self._check_key(answer)
            if answer is not None and answer.status in _BUSY:
                busy += 1
            else:
                failures += 1
            is_last = failures >= self._retries.attempts or busy >= self._retries.busy_attempts
            if is_last or isinstance(lost, DeadlineExceeded):
                return await self._give_up(answer, lost)
            self._log.warning("batch_retry", "retry", status=None if answer is None else answer.status, error=str(lost))
            wait_s = 0.0 if answer is None else retry_after_s(answer.headers.get("retry-after", ""))
            await asyncio.sleep(self._retries.delay_s(failures + busy, wait_s, self._rng.random()))

    async def _attempt(
        self, request: LineRequest, headers: Mapping[str, str]
    ) -> tuple[Answer | None, PdserveError | None]:
        try:
            return await self._inflight.run(partial(self._send_in_time, request, headers)), None
        except (Unavailable, DeadlineExceeded) as error:
            return None, error

    async def _send_in_time(self, request: LineRequest, headers: Mapping[str, str]) -> Answer:
        """Return the answer. Raises DeadlineExceeded, with the request cancelled at the server."""
        limit_s = self._retries.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._backend.send("POST", request.path, request.body, headers)
        except TimeoutError:
            raise DeadlineExceeded(f"no complete answer within {limit_s:g} s (--request-timeout)") from None

    async def _give_up(self, answer: Answer | None, lost: PdserveError | None) -> Answer:
        """Return the line's last answer or raise its last error; raise BatchStopped if the server is down."""
        last = str(lost) if answer is None else f"the server answers {answer.status}: {message_of(answer)}"
        if (problem := await self._health_problem()) is not None:
            raise BatchStopped(f"{last}, and {problem}")
        if answer is None:
            assert lost is not None
            raise lost
        return answer

    async def _health_problem(self) -> str | None:
        """Return why the server is not healthy, or None; a server without these paths counts as healthy."""
        for path in _PROBES:
            try:
                async with asyncio.timeout(_PROBE_S):
                    status = (await self._backend.send("GET", path)).status
            except (Unavailable, TimeoutError):
                return f"{path} does not respond"
            if status >= 500:
                return f"{path} answers {status}"
        return None

    def _check_key(self, answer: Answer) -> Answer:
        if answer.status == 401:
            raise BatchStopped("the server refuses the API key (401)")
        return answer
