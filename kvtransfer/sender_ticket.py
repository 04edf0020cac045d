"""The sender's half of a hand-off. Pure: no I/O, no lock, and time is a number passed in.

    HELD -> SENDING -> SENT -> ACKED              (the first three also -> ABORTED | EXPIRED)

Each rank of P has one for each rank of D that it sends to. The other half: ticket.py.
"""

from enum import StrEnum

from kvtransfer.coverage import Coverage, mask_of
from kvtransfer.framing import FrameRange
from kvtransfer.link_messages import Commit, Frame
from kvtransfer.terms import Terms, seal_of
from wire.errors import HandoffFailed

MAX_WAIT_LEASES = 30
_DIGEST_MODULUS = 1 << 64


class SenderState(StrEnum):
    """State of the sender's half of a ticket."""

    HELD = "held"
    SENDING = "sending"
    SENT = "sent"
    ACKED = "acked"
    ABORTED = "aborted"
    EXPIRED = "expired"


class SenderTicket:
    """The sender's half of one ticket: which frames were sent, and until when the blocks are held."""

    def __init__(
        self, ticket_id: str, epoch: int, terms: Terms, *, lease_s: float, now: float,
    ) -> None:  # fmt: skip
        self.ticket_id, self.epoch = ticket_id, epoch
        self.state = SenderState.HELD
        self.kv_bytes = 0
        self.resent_frames = 0
        self.lease_s = lease_s
        self._terms = terms
        self._coverage = Coverage()
        self._frames: list[Frame] = []
        self._resent: set[int] = set()
        self._digest_sum = 0
        self._renewed = self._progressed = now
        self._waits_since: float | None = None

    @property
    def over(self) -> bool:
        """Whether the ticket has ended, acked or not."""
        return self.state in (SenderState.ACKED, SenderState.ABORTED, SenderState.EXPIRED)

    def wanted(self, tensor: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that the receiver needs and has not been sent. Raises HandoffFailed."""
        terms = self._terms
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return []
        if not 0 <= start < end <= terms.num_tokens:
            raise HandoffFailed(f"tokens [{start}, {end}) were put for a ticket of {terms.num_tokens} tokens")
        if not terms.part.token_bytes[tensor]:
            return []
        return self._coverage.missing(max(start, terms.first_token), end, mask_of(tensor))

    def send(self, cut: FrameRange, digest: int, block_ids: tuple[int, ...]) -> Frame:
        """Make the next frame."""
        assert self.state in (SenderState.HELD, SenderState.SENDING)
        tensor, num_tensors, start, end = cut
        part, last = self._terms.part, tensor + num_tensors
        added = self._coverage.add(start, end, mask_of(tensor, num_tensors))
        assert added, f"tokens [{start}, {end}) of tensors [{tensor}, {last}) were sent before"
        frame = Frame(
            self.ticket_id, self.epoch, len(self._frames), part.tensors[tensor].layer, tensor, start, end,
            *part.heads[tensor], (end - start) * sum(part.token_bytes[tensor:last]), digest, block_ids,
            num_tensors=num_tensors,
        )  # fmt: skip
        self._frames.append(frame)
        self.kv_bytes += frame.num_bytes
        self._digest_sum = (self._digest_sum + seal_of(frame)) % _DIGEST_MODULUS
        self.state = SenderState.SENDING
        return frame

    def resend(self, number: int) -> Frame:
        """Return frame `number` to be sent again. Raises HandoffFailed if it does not exist or was resent before."""
        if self.state not in (SenderState.SENDING, SenderState.SENT) or number >= len(self._frames):
            raise HandoffFailed(f"frame {number} of {len(self._frames)} cannot be resent: the ticket is {self.state}")
        if number in self._resent:
            raise HandoffFailed(f"a second resend of frame {number} is requested")
        self._resent.add(number)
        self.resent_frames += 1
        return self._frames[number]

    def commit(self, description: bytes, description_digest: int) -> Commit | None:
        """Make the commit, once. Raises HandoffFailed if tokens that the receiver needs were not put."""
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return None
        first, end, part = self._terms.first_token, self._terms.num_tokens, self._terms.part
        owed = [number for number, num_bytes in enumerate(part.token_bytes) if num_bytes]
        if self._coverage.missing(first, end, sum(map(mask_of, owed))):
            missing = ((part.tensors[one], self._coverage.missing(first, end, mask_of(one))) for one in owed)
            tensor, ((start, end), *_) = next((one, gaps) for one, gaps in missing if gaps)
            raise HandoffFailed(f"tokens [{start}, {end}) of layer {tensor.layer} {tensor.name} were never put")
        self.state = SenderState.SENT
        return Commit(
            self.ticket_id, self.epoch, len(self._frames), self.kv_bytes, self._digest_sum,
            description_digest, description,
        )  # fmt: skip

    def holds(self, now: float) -> bool:
        """Return whether everything was sent and, at `now`, the lease still holds the blocks as announced."""
        return self.state is SenderState.SENT and now < self._lease_end

    def ack(self) -> bool:
        """Record that the receiver committed. Returns False unless everything was sent."""
        if self.state is not SenderState.SENT:
            return False
        self.state = SenderState.ACKED
        return True

    def abort(self) -> bool:
        """End the ticket; return False if it had ended."""
        return self._end(SenderState.ABORTED)

    def renew(self, now: float) -> bool:
        """Renew the lease while there is KV left to send; after that only the ack counts."""
        if self.state not in (SenderState.HELD, SenderState.SENDING):
            return False
        self._renewed = max(self._renewed, now)
        return True

    def progressed(self, now: float) -> None:
        """Record that at `now` its bytes were still being sent, or the work that it waits for made progress."""
        self._progressed = max(self._progressed, now)

    def receiver_renewed(self, now: float) -> None:
        """Record that at `now` the receiver reported progress without being done, so the ack may still arrive.

        This counts once everything was sent, for MAX_WAIT_LEASES: blocks must not be held forever.
        """
        if self.state is not SenderState.SENT:
            return
        if self._waits_since is None:
            self._waits_since = now
        if now < self._waits_since + MAX_WAIT_LEASES * self.lease_s:
            self.progressed(now)

    def renewal_due(self, now: float) -> bool:
        """Return whether a third of the lease has passed."""
        return now >= self._renewed + self.lease_s / 3

    def expire(self, now: float) -> bool:
        """End the ticket if its lease has expired."""
        return now >= self._lease_end and self._end(SenderState.EXPIRED)

    @property
    def _lease_end(self) -> float:
        return max(self._renewed, self._progressed) + self.lease_s

    def _end(self, state: SenderState) -> bool:
        if self.over:
            return False
        self.state = state
        return True
