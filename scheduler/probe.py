"""Send small requests over pairs not used recently: a pair is healthy if a request succeeded on it."""

import asyncio

from scheduler.dispatch import Dispatch
from scheduler.limits import ControlLimits
from scheduler.model.kind import ModelKind
from scheduler.placement import Plan
from scheduler.readiness import Readiness
from scheduler.recorded_output import RecordedOutput
from scheduler.request import GenerationRequest
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, NoCapacity, PdserveError
from wire.types import Pooling, SamplingParams

_log = EventLogger("probe")

PROBE_TOKEN_IDS = (1, 2, 3, 4)
_PROBE_PARAMS = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0)
_POOLINGS = {ModelKind.VECTORS: (Pooling(),), ModelKind.SCORES: (Pooling("score", second_text=2),)}
_ROUND_S = 1.0
_EAGER_ROUND_S = 0.05


class PathProbe:
    """Probes all due pairs, one at a time, until cancelled; the kind of request fits the model."""

    def __init__(self, dispatch: Dispatch, readiness: Readiness, limits: ControlLimits, kind: ModelKind) -> None:
        self._dispatch = dispatch
        self._poolings = _POOLINGS.get(kind, ())
        self._readiness = readiness
        self._limits = limits
        self._failures = CappedLog(_log)

    async def run(self) -> None:
        """Probe until cancelled; while nothing is ready, probe new pairs almost at once."""
        while True:
            answered = [await self._probe(plan) for plan in self._readiness.due()]
            eager = not self._readiness.ready() and all(answered)
            await asyncio.sleep(_EAGER_ROUND_S if eager else _ROUND_S)

    async def _probe(self, plan: Plan) -> bool:
        """Send one probe if there is room for it; return False if it failed."""
        if plan not in self._readiness.living_plans():  # lost while other pairs were probed
            return True
        if self._readiness.is_busy(plan):
            self._readiness.extend_use(plan)
            return True
        try:
            await self._dispatch.probe(self._request(self._readiness.slowness(plan)), plan, RecordedOutput())
        except PdserveError as error:
            if self._found_no_room(error, plan):
                self._readiness.extend_use(plan)
                _log.debug("probe_found_no_room", **self._readiness.names(plan), error=error)
                return True
            self._readiness.discard_use(plan)
            pair = self._readiness.names(plan)
            self._failures.warning("probe_failed", f"probe of {' and '.join(pair.values())}", **pair, error=error)
            return False
        return True

    def _found_no_room(self, error: PdserveError, plan: Plan) -> bool:
        """Whether the probe failed only for lack of room: refused by a progressing pair, or delayed by a full one."""
        if isinstance(error, NoCapacity):
            return self._readiness.progresses(plan)
        return isinstance(error, DeadlineExceeded) and self._readiness.is_busy(plan)

    def _request(self, slowness: float) -> GenerationRequest:
        timeout_s = self._limits.probe_timeout_s * slowness
        return GenerationRequest(
            "probe", (PROBE_TOKEN_IDS,), _PROBE_PARAMS, timeout_s, timeout_s, probe=True, poolings=self._poolings
        )
