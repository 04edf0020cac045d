"""Send small requests over pairs not used recently: a pair is healthy if a request succeeded on it."""

import asyncio
import contextlib

from scheduler.dispatch import Dispatch
from scheduler.limits import ControlLimits
from scheduler.membership.kv_pairs import KvGap
from scheduler.model.kind import ModelKind
from scheduler.placement import Plan
from scheduler.readiness import Readiness
from scheduler.recorded_output import RecordedOutput
from scheduler.request import GenerationRequest
from scheduler.workers.proof import difference, next_proofs, proof_prompt, proof_request
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, InstanceLost, NoCapacity, PdserveError
from wire.types import Pooling, SamplingParams, TokenOutput

_log = EventLogger("probe")

PROBE_TOKEN_IDS = (1, 2, 3, 4)
_PROBE_PARAMS = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0)
_POOLINGS = {
    ModelKind.VECTORS: (Pooling(),),
    ModelKind.SCORES: (Pooling("classify", second_text=2),),
    ModelKind.CLASSES: (Pooling("classify"),),
}
_ROUND_S = 1.0
_EAGER_ROUND_S = 0.05


class PathProbe:
    """Probes all due pairs, one at a time, and concurrently proves pairs of workers; requests fit the model's kind."""

    def __init__(self, dispatch: Dispatch, readiness: Readiness, limits: ControlLimits, kind: ModelKind) -> None:
        self._dispatch = dispatch
        self._poolings = _POOLINGS.get(kind, ())
        self._readiness = readiness
        self._limits = limits
        self._failures = CappedLog(_log)
        self._verdicts: dict[tuple[int, int], str | None] = {}  # by worker and epoch

    async def run(self) -> None:
        """Probe and prove until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._prove_pairs())
            tasks.create_task(self._compare_serving())
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
                for gap in next_proofs(self._readiness.unproven(), running):
                    running.add(gap)
                    tasks.create_task(prove(gap))
                ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ROUND_S if self._readiness.ready() else _EAGER_ROUND_S):
                        await ended.wait()

    async def _prove(self, prefill: int, decode: int) -> None:
        """Let a pair of workers serve if it answers like its decode worker alone, and that worker like our instances.

        A combined worker is both, so it is only compared with our own instances.
        """
        try:
            pair = Plan(self._readiness.description(prefill).path, prefill, decode, "proof")
            if prefill == decode:
                pair = _alone(decode)
        except InstanceLost:
            return
        names = self._readiness.names(pair)
        try:
            why = None if prefill == decode else await self._difference(_alone(decode), pair, "alone")
            why = why or await self._compare(decode)
        except PdserveError as error:
            why = str(error)
        if self._readiness.set_proof(pair, why):
            _log.info("pair_proven", **names)
        else:
            self._failures.warning("pair_not_proven", f"proof of {' and '.join(names.values())}", **names, reason=why)

    async def _compare_serving(self) -> None:
        """Compare the workers that serve already with our own instances once these answer; doubt one that differs."""
        while True:
            workers = self._readiness.decoding_workers()
            self._verdicts = {worker: why for worker, why in self._verdicts.items() if worker in workers}
            for decode, epoch in workers:
                if (decode, epoch) not in self._verdicts:
                    with contextlib.suppress(InstanceLost):
                        why = await self._compare(decode)
                        if why is not None:
                            self._readiness.doubt(decode, why)
            await asyncio.sleep(_ROUND_S)

    async def _compare(self, decode: int) -> str | None:
        """Return how a worker differs from our own instances, None if it does not or could not be compared yet.

        An error, such as one of our instances being full, says nothing about the worker: its last verdict stays.
        """
        worker, own = (decode, self._readiness.description(decode).epoch), self._readiness.own_plan()
        if own is not None:
            ours = " and ".join(self._readiness.names(own).values())
            with contextlib.suppress(PdserveError):
                why = await self._difference(own, _alone(decode), f"by {ours}")
                self._verdicts[worker] = None if why is None else f"it does not serve the model of {ours}: {why}"
                _log.info("worker_compared", **self._readiness.names(_alone(decode)), ours=ours, reason=why)
        return self._verdicts.get(worker)

    async def _difference(self, first: Plan, second: Plan, by: str) -> str | None:
        """Return how the answers of two plans differ, None if they do not. Raises PdserveError."""
        ends = [self._readiness.description(plan.decode) for plan in (first, second)]
        prompt = proof_prompt(ends[1].block_size, min(end.max_model_len for end in ends))

        async def answer(plan: Plan) -> list[TokenOutput]:
            timeout_s = self._limits.proof_timeout_s * self._readiness.slowness(plan)
            output = RecordedOutput()
            await self._dispatch.probe(proof_request(prompt, timeout_s), plan, output)
            return output.outputs[0, 0]

        return difference(await answer(first), await answer(second), by)

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


def _alone(decode: int) -> Plan:
    return Plan("local", None, decode, "proof")
