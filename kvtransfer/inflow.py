"""What one rank of P has sent for one ticket over one link. Pure.

announced -> moving -> verified            (a digest that differs: -> repeat -> moving -> verified, once)
complete: the commit is proposed, all frames are received and verified, and the sums agree
receipt:  owed -> requested -> held        (where nothing else proves that the bytes read are those announced)
"""

from dataclasses import dataclass, replace
from enum import Enum

from kvtransfer.coverage import Coverage, mask_of
from kvtransfer.link_messages import Commit, Frame
from kvtransfer.terms import Terms, check_frame, describe_frame, same_place, seal_of
from wire.errors import HandoffFailed
from wire.kv_layout import Rank

_DIGEST_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class SendingRank:
    """The sender of a link: one rank of one process of the sending instance."""

    sender_id: str
    epoch: int
    rank: Rank

    def __str__(self) -> str:
        return f"{self.sender_id} of epoch {self.epoch:x}, {self.rank}"


class FrameVerdict(Enum):
    """What the receiver does with an announced frame."""

    MOVE = "move"
    DUPLICATE = "duplicate"
    DROP = "drop"


class MoveResult(Enum):
    """The outcome of a finished move."""

    VERIFIED = "verified"
    REPEAT = "repeat"
    OVER = "over"


class _Receipt(Enum):
    NOT_NEEDED = "not needed"
    OWED = "owed"
    REQUESTED = "requested"
    HELD = "held"


class _FrameState(Enum):
    MOVING = "moving"
    REPEAT = "repeat"
    REPEATING = "repeating"
    VERIFIED = "verified"


@dataclass(slots=True)
class _Expected:
    frame: Frame
    state: _FrameState


class Inflow:
    """Owner of the frames of one link for one ticket. At `lease_end` the sender has been silent for too long.

    With `receipt` the sender must confirm, after the last read, that it held the blocks until then.
    """

    def __init__(self, source: SendingRank, terms: Terms, lease_end: float, *, receipt: bool = False) -> None:
        self.source, self.lease_end = source, lease_end
        self._receipt = _Receipt.OWED if receipt else _Receipt.NOT_NEEDED
        self.kv_bytes = 0
        self.complete = False
        self._terms, self._wanted_tokens = terms, terms.tensor_tokens
        self._coverage = Coverage()
        self._frames: dict[int, _Expected] = {}
        self._verified_tokens = 0
        self._digest_sum = 0
        self._commit: Commit | None = None

    @property
    def committed(self) -> bool:
        """Whether the sender has proposed its commit."""
        return self._commit is not None

    @property
    def description(self) -> bytes:
        """The prompt as serialised in the commit."""
        assert self._commit is not None
        return self._commit.description

    @property
    def owes_receipt(self) -> bool:
        """Whether the sender has yet to confirm that it held the blocks; always False before the first frame."""
        return self._receipt in (_Receipt.OWED, _Receipt.REQUESTED) and bool(self._frames)

    @property
    def waits_for_sender(self) -> bool:
        """Whether the sender's lease counts: it still owes frames, its commit, or a requested receipt."""
        return not self.complete or self._receipt is _Receipt.REQUESTED

    def request_receipt(self, lease_end: float) -> bool:
        """Return whether to request the receipt now: True once, when complete. The receipt is due by `lease_end`."""
        if not self.complete or not self.owes_receipt or self._receipt is _Receipt.REQUESTED:
            return False
        self._receipt, self.lease_end = _Receipt.REQUESTED, max(self.lease_end, lease_end)
        return True

    def held(self) -> bool:
        """Record the receipt; return False if it was not requested, or is a duplicate."""
        if self._receipt is not _Receipt.REQUESTED:
            return False
        self._receipt = _Receipt.HELD
        return True

    def accept(self, frame: Frame) -> FrameVerdict:
        """Check an announced frame before a byte is moved. Raises HandoffFailed if it violates the terms."""
        known = self._frames.get(frame.number)
        if known is None:
            self._record_range(frame)
            self._frames[frame.number] = _Expected(_without_blocks(frame), _FrameState.MOVING)
        elif known.state is not _FrameState.REPEAT:
            return FrameVerdict.DUPLICATE
        elif not same_place(known.frame, frame):
            raise HandoffFailed(
                f"frame {frame.number} was resent with a different range: first {describe_frame(known.frame)}, "
                f"now {describe_frame(frame)}"
            )
        else:
            known.frame, known.state = _without_blocks(frame), _FrameState.REPEATING
        return FrameVerdict.MOVE

    def finish(self, number: int, digest: int) -> MoveResult:
        """Check the digest of a moved frame. Raises HandoffFailed at the second mismatch."""
        expected = self._frames[number]
        frame = expected.frame
        if digest == frame.digest:
            expected.state = _FrameState.VERIFIED
            self._verified_tokens += _tensor_tokens(frame)
            self._digest_sum = (self._digest_sum + seal_of(frame)) % _DIGEST_MODULUS
            self.kv_bytes += frame.num_bytes
            return MoveResult.VERIFIED
        if expected.state is _FrameState.REPEATING:
            raise HandoffFailed(
                f"KV of {describe_frame(frame)} was corrupt twice: digest {frame.digest:016x} sent, {digest:016x} read"
            )
        expected.state = _FrameState.REPEAT
        return MoveResult.REPEAT

    def propose(self, commit: Commit) -> FrameVerdict:
        """Record the sender's commit. Raises HandoffFailed if frames are missing."""
        if self._commit is not None:
            return FrameVerdict.DUPLICATE
        claimed = sum(_tensor_tokens(known.frame) for known in self._frames.values())
        if len(self._frames) != commit.num_frames or claimed != self._wanted_tokens:
            raise HandoffFailed(
                f"the number of frames is {commit.num_frames} in the commit, but {len(self._frames)} were received, "
                f"with {claimed} of {self._wanted_tokens} tensor tokens"
            )
        self._commit = commit
        return FrameVerdict.MOVE

    def check_complete(self) -> bool:
        """Check whether everything is received, and set `complete`. Raises HandoffFailed if the sums differ."""
        commit = self._commit
        if self.complete or commit is None or self._verified_tokens != self._wanted_tokens:
            return self.complete
        if (commit.kv_bytes, commit.digest_sum) != (self.kv_bytes, self._digest_sum):
            raise HandoffFailed(
                f"the commit states {commit.kv_bytes} bytes with digest sum {commit.digest_sum:016x}, but "
                f"{self.kv_bytes} bytes with digest sum {self._digest_sum:016x} were received"
            )
        self.complete = True
        return True

    def _record_range(self, frame: Frame) -> None:
        """Check a new frame and record its tokens as covered."""
        check_frame(frame, self._terms)
        tensors = mask_of(frame.tensor, frame.num_tensors)
        if self._commit is not None or not self._coverage.add(frame.start, frame.end, tensors):
            raise HandoffFailed(f"{describe_frame(frame)} was sent twice, or after the commit")


def _tensor_tokens(frame: Frame) -> int:
    return frame.num_tensors * (frame.end - frame.start)


def _without_blocks(frame: Frame) -> Frame:
    """Return the frame as kept until the ticket ends: without block ids, which are needed only for its move."""
    return replace(frame, block_ids=()) if frame.block_ids else frame
