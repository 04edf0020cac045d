"""Run a request with an Idempotency-Key once: one instance of the table keeps a record of it (wire/claim_table.py).

client's POST --ClaimRun--> the instance that rendezvous hashing names --Claimed--> run it, join it, or answer at once
that instance is lost --ClaimRun--> the next one, while the request runs
"""

import asyncio
import secrets
from contextlib import suppress
from hashlib import blake2b

from scheduler.finished_requests import FinishedRequests
from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.registry import Registry
from telemetry.logs import EventLogger
from wire.claim_table import KEPT_S, MAX_KEPT_ANSWER
from wire.errors import InstanceLost, Unavailable
from wire.messages import Claimed, ClaimRun, ClaimState, EndClaim, RunEnd
from wire.types import Role

_log = EventLogger("claims")

_MAX_FINISHED = 4096
_RETRY_S = 0.1


class RequestClaims:
    """Chooses the instances that keep records, and counts requests that run again."""

    def __init__(self, registry: Registry, limits: ControlLimits, ledger: FinishedRequests) -> None:
        self.settle_s = limits.settle_s
        self._registry, self._ledger = registry, ledger
        self._finished: dict[str, float] = {}  # when their records end: a request that runs again is counted

    def claim(self, tenant: str, key: str, content: bytes, stream_id: str) -> "RequestClaim":
        """Return the claim, not made yet, to run a request with these keys and content as this stream."""
        record_id = blake2b(f"{tenant}\0{key}".encode(), digest_size=16).hexdigest()
        return RequestClaim(self, tenant, record_id, blake2b(content, digest_size=16).hexdigest(), stream_id)

    def holder(self, record_id: str) -> Instance:
        """Return the living decode instance that keeps the record. Raises Unavailable if there is none."""
        living = [one for one in self._registry.living() if one.description.worker is None]
        ends = [one for one in living if one.description.role is not Role.PREFILL]
        if not ends:
            raise Unavailable("no decode instance that could keep the record of an Idempotency-Key is connected")
        return max(ends, key=lambda one: blake2b(f"{one.description.instance_id} {record_id}".encode()).digest())

    def ran_again(self) -> None:
        """Count a request that is run a second time."""
        self._ledger.run_again += 1

    def began(self, record_id: str) -> None:
        """Note a run without a record: if it has finished here before, the record was lost."""
        if self._finished.pop(record_id, 0.0) > asyncio.get_running_loop().time():
            self.ran_again()

    def finished(self, record_id: str) -> None:
        """Note the end of a run."""
        if len(self._finished) >= _MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        self._finished[record_id] = asyncio.get_running_loop().time() + KEPT_S


class RequestClaim:
    """One request's right to run, as the stream `stream_id`; until its end it is moved if its instance is lost."""

    def __init__(self, claims: RequestClaims, tenant: str, record_id: str, digest: str, stream_id: str) -> None:
        self.claims, self.stream_id = claims, stream_id
        self._tenant, self._record_id, self._digest = tenant, record_id, digest
        self._id = secrets.token_hex(8)
        self._holder: Instance | None = None
        self._moving: asyncio.Task[None] | None = None

    async def make(self) -> Claimed:
        """Claim the run. If the answer is NEW or ORPHANED it is ours until `finish` or `end`. Raises Unavailable."""
        while True:
            holder = self.claims.holder(self._record_id)
            with suppress(InstanceLost):
                claimed = await self._ask(holder)
                break
        if claimed.state is ClaimState.ORPHANED:
            self.stream_id = claimed.stream_id
        if claimed.state in (ClaimState.NEW, ClaimState.ORPHANED):
            self._hold(holder)
        if claimed.state is ClaimState.NEW:
            self.claims.began(self._record_id)
        return claimed

    async def take(self, stream_id: str) -> None:
        """Own the run of a stream that was adopted from a scheduler that runs it."""
        self.stream_id = stream_id
        with suppress(Unavailable):
            holder = self.claims.holder(self._record_id)
            await self._ask(holder)
            self._hold(holder)

    async def finish(self, answer: bytes) -> None:
        """Keep the answer for repeated requests. If no instance can, they run again."""
        self._stop_moving()
        if self._holder is None:
            return
        with suppress(Unavailable):
            holder = self.claims.holder(self._record_id)
            if holder is not self._holder:
                await self._claim_again(holder)
            holder.post(self._end(RunEnd.DONE, answer if len(answer) <= MAX_KEPT_ANSWER else b""))
            self.claims.finished(self._record_id)
        self._holder = None

    def end(self, end: RunEnd) -> None:
        """Report another end, or that the client left; does nothing after the first end."""
        if self._holder is not None:
            self._holder.post(self._end(end))
        if end is not RunEnd.LEFT:
            self._stop_moving()
            self._holder = None

    def _hold(self, holder: Instance) -> None:
        self._holder = holder
        self._moving = asyncio.create_task(self._move_if_lost(holder))

    async def _move_if_lost(self, holder: Instance) -> None:
        while True:
            with suppress(InstanceLost), holder.claim_answers.expect(self._id, "this request has a claim") as end:
                await end
            while not holder.is_living:
                try:
                    holder = self.claims.holder(self._record_id)
                    await self._claim_again(holder)
                except Unavailable:
                    await asyncio.sleep(_RETRY_S)
            self._holder = holder

    async def _claim_again(self, holder: Instance) -> None:
        """Make the claim of this run at another instance. There the same request may run already, or have run."""
        claimed = await self._ask(holder)
        if claimed.state is not ClaimState.NEW:
            _log.warning("request_runs_twice", instance=holder, state=claimed.state)
            self.claims.ran_again()

    def _stop_moving(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None

    async def _ask(self, holder: Instance) -> Claimed:
        """Raises Unavailable, InstanceLost if the session ends."""
        command = ClaimRun(self._id, self._record_id, self._tenant, self._digest, self.stream_id)
        claimed: Claimed | None = None
        try:
            with holder.claim_answers.expect(self._id, "this request is making its claim") as answer:
                holder.post(command)
                async with asyncio.timeout(self.claims.settle_s):
                    claimed = await answer
            return claimed
        except TimeoutError:
            raise Unavailable(f"{holder}, which keeps the record of this Idempotency-Key, does not answer") from None
        finally:
            if claimed is None:
                holder.post(self._end(RunEnd.FAILED))

    def _end(self, end: RunEnd, answer: bytes = b"") -> EndClaim:
        return EndClaim(self._id, self._record_id, self._tenant, self._digest, end, answer)
