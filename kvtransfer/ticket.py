"""The two state machines of a hand-off. Pure: no I/O, no lock, and time is a number passed in.

    receiver  RESERVED -> RECEIVING -> COMMITTED            (the first two also -> ABORTED | EXPIRED)
    sender    HELD -> SENDING -> SENT -> ACKED              (the first three also -> ABORTED | EXPIRED)

Everything is idempotent by (ticket id, epoch, frame number). Each side counts its lease on its own clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from kvtransfer.coverage import Coverage
from kvtransfer.digest import StopFlag
from kvtransfer.frame import Commit, Frame
from kvtransfer.terms import check_frame, in_words, same_place
from wire.errors import HandoffFailed
from wire.kv_layout import KvTensor

_DIGEST_MODULUS = 1 << 64


class ReceiverState(StrEnum):
    """Where the receiver's half of a ticket is."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class SenderState(StrEnum):
    """Where the sender's half of a ticket is."""

    HELD = "held"
    SENDING = "sending"
    SENT = "sent"
    ACKED = "acked"
    ABORTED = "aborted"
    EXPIRED = "expired"


class Verdict(Enum):
    """What the receiver does with an announced frame."""

    MOVE = "move"
    DUPLICATE = "duplicate"
    DROP = "drop"


class Progress(Enum):
    """What a finished move means."""

    VERIFIED = "verified"
    REPEAT = "repeat"
    OVER = "over"


class _FrameState(Enum):
    MOVING = "moving"
    REPEAT = "repeat"
    REPEATING = "repeating"
    VERIFIED = "verified"


@dataclass(slots=True)
class _Expected:
    frame: Frame
    state: _FrameState


class ReceiverTicket:
    """The receiver's half of one ticket, of one link once it is opened.

    A move runs outside every lock, so the ticket may end under it: `take_release` then says False until the move is
    finished, and True exactly once after that. `stop` cuts such a move short.
    """

    def __init__(
        self, ticket_id: str, epoch: int, tensors: Sequence[KvTensor], *,
        num_tokens: int, first_token: int, block_ids: tuple[int, ...], lease_s: float, now: float,
    ) -> None:  # fmt: skip
        self.ticket_id, self.epoch, self.block_ids = ticket_id, epoch, block_ids
        self.num_tokens, self.first_token = num_tokens, first_token
        self.state = ReceiverState.RESERVED
        self.link: int | None = None
        self.reason = ""
        self.stop = StopFlag()
        self.kv_bytes = 0
        self._tensors = tensors
        self._coverage = [Coverage() for _ in tensors]
        self._frames: dict[int, _Expected] = {}
        self._verified_tokens = 0
        self._digest_sum = 0
        self._moving = 0
        self._commit: Commit | None = None
        self._committing = False
        self._released = False
        self._lease_s = lease_s
        self._lease_end = now + lease_s

    @property
    def over(self) -> bool:
        """Whether the ticket has ended, well or not."""
        return self.state not in (ReceiverState.RESERVED, ReceiverState.RECEIVING)

    @property
    def description(self) -> bytes:
        """What the accepted commit says the prompt is."""
        assert self._commit is not None
        return self._commit.description

    def open(self, link: int, num_tokens: int, first_token: int, now: float) -> None:
        """Bind the ticket to a link. Raises HandoffFailed if it has another or means other tokens."""
        if self.over or self.link not in (None, link):
            raise HandoffFailed(f"ticket {self.ticket_id} is {self.state} and cannot be opened here")
        if (num_tokens, first_token) != (self.num_tokens, self.first_token):
            raise HandoffFailed(
                f"tokens [{self.first_token}, {self.num_tokens}) are wanted, [{first_token}, {num_tokens}) are offered"
            )
        self.link, self.state = link, ReceiverState.RECEIVING
        self.renew(now)

    def renew(self, now: float) -> None:
        """Start the lease anew."""
        self._lease_end = max(self._lease_end, now + self._lease_s)

    def accept(self, frame: Frame, link: int) -> Verdict:
        """Judge an announced frame before a byte moves. Raises HandoffFailed if it breaks the ticket's terms."""
        if self.state is not ReceiverState.RECEIVING or frame.epoch != self.epoch or link != self.link:
            return Verdict.DROP
        known = self._frames.get(frame.number)
        if known is None:
            self._check(frame)
            self._coverage[frame.tensor].add(frame.start, frame.end)
            self._frames[frame.number] = _Expected(frame, _FrameState.MOVING)
        elif known.state is not _FrameState.REPEAT:
            return Verdict.DUPLICATE
        elif not same_place(known.frame, frame):
            raise HandoffFailed(
                f"frame {frame.number} came again as another: {in_words(known.frame)}, {in_words(frame)}"
            )
        else:
            known.frame, known.state = frame, _FrameState.REPEATING
        self._moving += 1
        return Verdict.MOVE

    def finish(self, number: int, digest: int | None, now: float) -> Progress:
        """Take the digest of a moved frame (None: the move was cut short). Raises HandoffFailed at the second miss."""
        self._moving -= 1
        expected = self._frames[number]
        if self.over or digest is None:
            return Progress.OVER
        frame = expected.frame
        if digest == frame.digest:
            expected.state = _FrameState.VERIFIED
            self._verified_tokens += frame.end - frame.start
            self._digest_sum = (self._digest_sum + digest) % _DIGEST_MODULUS
            self.kv_bytes += frame.num_bytes
            self.renew(now)
            return Progress.VERIFIED
        if expected.state is _FrameState.REPEATING:
            raise HandoffFailed(
                f"KV of {in_words(frame)} is corrupt twice: digest {frame.digest:016x} sent, {digest:016x} received"
            )
        expected.state = _FrameState.REPEAT
        return Progress.REPEAT

    def propose(self, commit: Commit, link: int) -> Verdict:
        """Take the sender's commit; `ready` tells when it is granted. Raises HandoffFailed if frames are missing."""
        if self.state is not ReceiverState.RECEIVING or commit.epoch != self.epoch or link != self.link:
            return Verdict.DROP
        if self._commit is not None:
            return Verdict.DUPLICATE
        claimed = sum(known.frame.end - known.frame.start for known in self._frames.values())
        if len(self._frames) != commit.num_frames or claimed != self._wanted_tokens:
            raise HandoffFailed(
                f"commit of {commit.num_frames} frames: {len(self._frames)} came with {claimed} of "
                f"{self._wanted_tokens} tensor tokens"
            )
        self._commit = commit
        return Verdict.MOVE

    def ready(self) -> bool:
        """Tell whether a commit is proposed and every frame is in and verified. Raises HandoffFailed on other sums."""
        commit = self._commit
        if self.over or self._committing or commit is None or self._verified_tokens != self._wanted_tokens:
            return False
        if (commit.kv_bytes, commit.digest_sum) != (self.kv_bytes, self._digest_sum):
            raise HandoffFailed(
                f"commit of {commit.kv_bytes} bytes, digests {commit.digest_sum:016x}: "
                f"{self.kv_bytes} bytes, {self._digest_sum:016x} came"
            )
        return True

    def begin_commit(self) -> None:
        """From here until `settle` the ticket can neither end nor expire."""
        assert self.ready()
        self._committing = True

    def settle(self, refusal: str | None) -> None:
        """The owner took the blocks, or refused them in words."""
        assert self._committing
        self._committing = False
        self.state = ReceiverState.COMMITTED if refusal is None else ReceiverState.ABORTED
        self.reason = refusal or ""

    def abort(self, reason: str) -> bool:
        """End the ticket; False if it had ended or is being committed."""
        return self._end(ReceiverState.ABORTED, reason)

    def expire(self, now: float) -> bool:
        """End the ticket if its lease ran out."""
        if now < self._lease_end:
            return False
        return self._end(ReceiverState.EXPIRED, f"no renewal within the lease of {self._lease_s:g} s")

    def take_release(self) -> bool:
        """Tell exactly once, after a bad ending and the last move, that the blocks are free."""
        if self.state not in (ReceiverState.ABORTED, ReceiverState.EXPIRED) or self._moving or self._released:
            return False
        self._released = True
        return True

    @property
    def _wanted_tokens(self) -> int:
        return len(self._tensors) * (self.num_tokens - self.first_token)

    def _end(self, state: ReceiverState, reason: str) -> bool:
        if self.over or self._committing:
            return False
        self.state, self.reason = state, reason
        self.stop.set()
        return True

    def _check(self, frame: Frame) -> None:
        check_frame(frame, self._tensors, first_token=self.first_token, num_tokens=self.num_tokens)
        if self._commit is not None or self._coverage[frame.tensor].overlaps(frame.start, frame.end):
            raise HandoffFailed(f"{in_words(frame)} came twice, or after the commit")


class SenderTicket:
    """The sender's half of one ticket: which frames went out, and until when the blocks are held."""

    def __init__(
        self, ticket_id: str, epoch: int, tensors: Sequence[KvTensor], *,
        num_tokens: int, first_token: int, lease_s: float, now: float,
    ) -> None:  # fmt: skip
        self.ticket_id, self.epoch = ticket_id, epoch
        self.num_tokens, self.first_token = num_tokens, first_token
        self.state = SenderState.HELD
        self.kv_bytes = 0
        self.resent_frames = 0
        self.lease_s = lease_s
        self._tensors = tensors
        self._coverage = [Coverage() for _ in tensors]
        self._frames: list[Frame] = []
        self._resent: set[int] = set()
        self._digest_sum = 0
        self._renewed = now

    @property
    def over(self) -> bool:
        """Whether the ticket has ended, well or not."""
        return self.state in (SenderState.ACKED, SenderState.ABORTED, SenderState.EXPIRED)

    def wanted(self, tensor: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that the receiver wants and that were not sent. Raises HandoffFailed."""
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return []
        if not 0 <= start < end <= self.num_tokens:
            raise HandoffFailed(f"tokens [{start}, {end}) are put for a ticket of {self.num_tokens} tokens")
        return self._coverage[tensor].missing(max(start, self.first_token), end)

    def send(self, tensor: int, start: int, end: int, digest: int, block_ids: tuple[int, ...]) -> Frame:
        """Make the next frame."""
        assert self.state in (SenderState.HELD, SenderState.SENDING)
        spec = self._tensors[tensor]
        self._coverage[tensor].add(start, end)
        frame = Frame(
            self.ticket_id, self.epoch, len(self._frames), spec.layer, tensor, start, end, 0, spec.heads,
            (end - start) * spec.token_bytes, digest, block_ids,
        )  # fmt: skip
        self._frames.append(frame)
        self.kv_bytes += frame.num_bytes
        self._digest_sum = (self._digest_sum + digest) % _DIGEST_MODULUS
        self.state = SenderState.SENDING
        return frame

    def resend(self, number: int) -> Frame:
        """Return frame `number` to go out once more. Raises HandoffFailed if there is none or it did so before."""
        if self.state not in (SenderState.SENDING, SenderState.SENT) or number >= len(self._frames):
            raise HandoffFailed(f"frame {number} is asked for again, {len(self._frames)} were sent")
        if number in self._resent:
            raise HandoffFailed(f"frame {number} is asked for a third time")
        self._resent.add(number)
        self.resent_frames += 1
        return self._frames[number]

    def commit(self, description: bytes, description_digest: int) -> Commit | None:
        """Make the commit, once. Raises HandoffFailed if tokens that the receiver wants were not put."""
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return None
        for tensor, coverage in zip(self._tensors, self._coverage, strict=True):
            for start, end in coverage.missing(self.first_token, self.num_tokens):
                raise HandoffFailed(f"tokens [{start}, {end}) of layer {tensor.layer} {tensor.name} were never put")
        self.state = SenderState.SENT
        return Commit(
            self.ticket_id, self.epoch, len(self._frames), self.kv_bytes, self._digest_sum,
            description_digest, description,
        )  # fmt: skip

    def ack(self) -> bool:
        """The receiver committed. False unless everything was sent."""
        if self.state is not SenderState.SENT:
            return False
        self.state = SenderState.ACKED
        return True

    def abort(self) -> bool:
        """End the ticket; False if it had ended."""
        return self._end(SenderState.ABORTED)

    def renew(self, now: float) -> bool:
        """Start the lease anew while there is something left to send; afterwards only the ack counts."""
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return False
        self._renewed = max(self._renewed, now)
        return True

    def renewal_due(self, now: float) -> bool:
        """Tell whether a third of the lease is over."""
        return now >= self._renewed + self.lease_s / 3

    def expire(self, now: float) -> bool:
        """End the ticket if its lease ran out."""
        return now >= self._renewed + self.lease_s and self._end(SenderState.EXPIRED)

    def _end(self, state: SenderState) -> bool:
        if self.over:
            return False
        self.state = state
        return True
