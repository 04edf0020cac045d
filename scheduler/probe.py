"""Send small requests over pairs not used recently: a pair is healthy if a request succeeded on it."""

import asyncio
import contextlib
import secrets

from scheduler.dispatch import Dispatch
from scheduler.limits import ControlLimits
from scheduler.membership.kv_pairs import KvGap
from scheduler.model.kind import ModelKind
from scheduler.placement import Plan
from scheduler.readiness import Readiness
from scheduler.recorded_output import RecordedOutput
from scheduler.request import GenerationRequest
from scheduler.workers.proof import difference, next_proofs, proof_request
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, InstanceLost, NoCapacity, PdserveError
from wire.types import Pooling, SamplingParams, TokenOutput

_log = EventLogger("probe")

PROBE_TOKEN_IDS = (1, 2, 3, 4)
_PROBE_PARAMS = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0)
_POOLINGS = {ModelKind.VECTORS: (Pooling(),), ModelKind.SCORES: (Pooling("score", second_text=2),)}
_ROUND_S = 1.0
_EAGER_ROUND_S = 0.05


class PathProbe:
    """Probes all due pairs, one at a time, and concurrently proves pairs of workers; the requests fit the model."""

    def __init__(self, dispatch: Dispatch, readiness: Readiness, limits: ControlLimits, kind: ModelKind) -> None:
        self._dispatch = dispatch
        self._poolings = _POOLINGS.get(kind, ())
        self._readiness = readiness
        self._limits = limits
        self._failures = CappedLog(_log)
        self._uncompared: set[tuple[int, int]] = set()

    async def run(self) -> None:
        """Probe and prove until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._prove_pairs())
            tasks.create_task(self._probe_pairs())

    async def _probe_pairs(self) -> None:
        """Probe the due pairs; while nothing is ready, probe new pairs almost at once."""
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

    async def _prove_pairs(self) -> None:
        """Run the due proofs: when one ends, the next one starts."""
        running: set[KvGap] = set()
        ended = asyncio.Event()

        async def prove(gap: KvGap) -> None:
            await self._prove(gap.sender, gap.receiver)
            running.discard(gap)
            ended.set()

        async with asyncio.TaskGroup() as tasks:
            while True:
                self._doubt_uncompared()
                for gap in next_proofs(self._readiness.unproven(), running):
                    running.add(gap)
                    tasks.create_task(prove(gap))
                ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ROUND_S if self._readiness.ready() else _EAGER_ROUND_S):
                        await ended.wait()

    async def _prove(self, prefill: int, decode: int) -> None:
        """Let a pair of workers serve if it answers like its decode worker alone, and that like our own instances."""
        try:
            path = self._readiness.description(prefill).path
        except InstanceLost:
            return
        pair, own = Plan(path, prefill, decode, "proof"), self._readiness.own_plan()
        names = self._readiness.names(pair)
        try:
            why = await self._difference(pair, own)
        except PdserveError as error:
            why = str(error)
        if self._readiness.set_proof(pair, why):
            if own is None:
                self._uncompared.add((prefill, decode))
            _log.info("pair_proven", **names)
        else:
            self._failures.warning("pair_not_proven", f"proof of {' and '.join(names.values())}", **names, reason=why)

    async def _difference(self, pair: Plan, own: Plan | None) -> str | None:
        """Return how the answers differ, None if they do not. Raises PdserveError."""
        longest = min(self._readiness.description(one.decode).max_model_len for one in (pair, own) if one is not None)
        block_size = self._readiness.description(pair.decode).block_size

        async def answer(plan: Plan) -> list[TokenOutput]:
            timeout_s = self._limits.proof_timeout_s * self._readiness.slowness(plan)
            output = RecordedOutput()
            request = proof_request(block_size, longest, secrets.token_hex(8), timeout_s)
            await self._dispatch.probe(request, plan, output)
            return output.outputs[0, 0]

        alone = await answer(Plan("local", None, pair.decode, "proof"))
        why = difference(alone, await answer(pair))
        if why is not None or own is None:
            return why
        ours = " and ".join(self._readiness.names(own).values())
        why = difference(await answer(own), alone, f"by {ours}")
        return None if why is None else f"it does not serve the model of {ours}: {why}"

    def _doubt_uncompared(self) -> None:
        """Prove again, beside our own instances, the pairs that were proven while there were none."""
        if self._uncompared and self._readiness.own_plan() is not None:
            for pair in self._uncompared:
                self._readiness.doubt(*pair, "not compared with pdserve's own instances yet")
            self._uncompared.clear()

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
