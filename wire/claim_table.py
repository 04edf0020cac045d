"""Requests with an Idempotency-Key: which scheduler runs each, and the answers of those that have finished.

absent --ClaimRun--> running --EndClaim(done)--> done, for KEPT_S
                    |-- EndClaim(failed) --> absent
                    |-- EndClaim(left): its client left, its scheduler still runs it; its stream may be adopted
                    |-- EndClaim(moved), or its session ends --> orphaned --the next ClaimRun takes it over--> running
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from wire.event_sink import EventSink
from wire.messages import Claimed, ClaimRun, ClaimState, EndClaim, RunEnd

KEPT_S = 600.0
"""How long a finished answer is kept, and a record whose scheduler is gone."""
MAX_CLAIM_BYTES = 16 * 2**20
"""Of one API key, on one instance: beyond it the oldest finished answers are forgotten, else no more are accepted."""
MAX_KEPT_ANSWER = 2**20
_RECORD_BYTES = 512


@dataclass(slots=True)
class _ClaimRecord:
    """One request; `answer` is None while it runs. An orphaned one has no `owner`, or one whose session has ended."""

    tenant: str
    digest: str
    stream_id: str
    claim_id: str
    owner: EventSink | None
    at: float
    answer: bytes | None = None
    has_left: bool = False

    @property
    def is_running(self) -> bool:
        """Whether a scheduler that has a session runs it."""
        return self.answer is None and self.owner is not None and not self.owner.ended

    @property
    def num_bytes(self) -> int:
        """About how much memory it occupies."""
        return _RECORD_BYTES + len(self.answer or b"")


class ClaimTable:
    """Owner of the records of one instance, least recently used first. Event loop only."""

    def __init__(self) -> None:
        self._records: dict[str, _ClaimRecord] = {}
        self._bytes = Counter[str]()

    def handle(self, owner: EventSink, command: ClaimRun | EndClaim, now: float) -> None:
        """Execute a command of a scheduler; emits Claimed in answer to ClaimRun."""
        self._forget_old(now)
        if isinstance(command, EndClaim):
            self._end(command, now)
        else:
            owner.emit(self._claim(owner, command, now))

    def _claim(self, owner: EventSink, command: ClaimRun, now: float) -> Claimed:
        record, claim_id = self._records.get(command.record_id), command.claim_id
        if record is None:
            if not self._has_room(command.tenant):
                return Claimed(claim_id, ClaimState.FULL)
            self._put(
                command.record_id,
                _ClaimRecord(command.tenant, command.digest, command.stream_id, claim_id, owner, now),
            )
            return Claimed(claim_id, ClaimState.NEW)
        if record.digest != command.digest:
            return Claimed(claim_id, ClaimState.DIFFERENT)
        if record.answer is not None:
            return Claimed(claim_id, ClaimState.DONE, record.stream_id, record.answer)
        is_same = record.stream_id == command.stream_id  # it runs this stream already
        if record.is_running and not is_same:
            return Claimed(claim_id, ClaimState.LEFT if record.has_left else ClaimState.RUNNING, record.stream_id)
        record.owner, record.claim_id, record.at, record.has_left = owner, claim_id, now, False
        self._records[command.record_id] = self._records.pop(command.record_id)
        return Claimed(claim_id, ClaimState.NEW if is_same else ClaimState.ORPHANED, record.stream_id)

    def _end(self, command: EndClaim, now: float) -> None:
        record = self._records.get(command.record_id)
        if command.end is RunEnd.DONE:  # also of another run: the request has this answer
            if record is None or record.digest == command.digest:
                self._drop(command.record_id)
                answer = command.answer if len(command.answer) <= MAX_KEPT_ANSWER else b""
                self._put(command.record_id, _ClaimRecord(command.tenant, command.digest, "", "", None, now, answer))
                self._has_room(command.tenant)
        elif record is None or record.claim_id != command.claim_id:
            return
        elif command.end is RunEnd.FAILED:
            self._drop(command.record_id)
        elif command.end is RunEnd.LEFT:
            record.has_left = True
        else:
            record.owner = None

    def _has_room(self, tenant: str) -> bool:
        """Forget the oldest finished answers of a key that has too many bytes; return whether it has room then."""
        excess = self._bytes[tenant] - MAX_CLAIM_BYTES
        if excess >= 0:
            finished = ((id_, one) for id_, one in self._records.items() if one.tenant == tenant and not one.is_running)
            for record_id, record in list(finished):
                if excess < 0:
                    break
                excess -= record.num_bytes
                self._drop(record_id)
        return excess < 0

    def _forget_old(self, now: float) -> None:
        old = list(takewhile(lambda item: item[1].at + KEPT_S <= now, self._records.items()))
        for record_id, record in old:
            self._drop(record_id)
            if record.is_running:
                record.at = now
                self._put(record_id, record)

    def _put(self, record_id: str, record: _ClaimRecord) -> None:
        self._records[record_id] = record
        self._bytes[record.tenant] += record.num_bytes

    def _drop(self, record_id: str) -> None:
        record = self._records.pop(record_id, None)
        if record is not None:
            self._bytes[record.tenant] -= record.num_bytes
            if not self._bytes[record.tenant]:
                del self._bytes[record.tenant]
