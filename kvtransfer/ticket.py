"""The receiver's half of a hand-off. Pure: no I/O, no lock, and time is a number passed in.

    RESERVED -> RECEIVING -> COMMITTED            (the first two also -> ABORTED | EXPIRED)

Everything is idempotent by (ticket id, epoch, frame number). Each side measures its lease on its own clock. With
several ranks, each rank of D has a share of the ticket, and rank 0 settles them together (quorum.py). The other half:
sender_ticket.py.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvtransfer.digest import StopFlag
from kvtransfer.inflow import FrameVerdict, Inflow, MoveResult, SendingRank
from kvtransfer.link_messages import Commit, Frame
from kvtransfer.ranks import Senders
from kvtransfer.slots import Windows
from kvtransfer.terms import RankHeads, Terms
from wire.errors import HandoffFailed


class ReceiverState(StrEnum):
    """State of the receiver's half of a ticket."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class ReceiverTicket:
    """The receiver's half of one ticket on one rank: what each sending rank of P has sent over its link.

    A move runs outside every lock, so the ticket may end during it: `take_release` then returns False until the move
    has finished, and True exactly once after that. `stop` interrupts such a move.
    """

    def __init__(
        self, ticket_id: str, epoch: int, senders: Senders, *,
        num_tokens: int, first_token: int, block_ids: tuple[int, ...], lease_s: float, now: float,
    ) -> None:  # fmt: skip
        self.ticket_id, self.epoch, self.block_ids = ticket_id, epoch, block_ids
        self.num_tokens, self.first_token = num_tokens, first_token
        self.state = ReceiverState.RESERVED
        self.reason = ""
        self.stop = StopFlag()
        self.windows = Windows()
        self._senders = senders
        self._owed: Mapping[int, RankHeads] = {}  # by P rank, known since the first open
        self._inflows: dict[int, Inflow] = {}  # by link
        self._moving = 0
        self._proposed = self._committing = False
        self._released = False
        self._lease_s = lease_s
        self._lease_end = now + lease_s
        self.progress = 0
        self._reported, self._reported_at = 0, now

    @property
    def over(self) -> bool:
        """Whether the ticket has ended, committed or not."""
        return self.state not in (ReceiverState.RESERVED, ReceiverState.RECEIVING)

    @property
    def committing(self) -> bool:
        """Whether everything is received and rank 0 has not settled yet: it cannot end by itself."""
        return self._committing

    @property
    def links(self) -> tuple[int, ...]:
        """The links on which it was opened."""
        return tuple(self._inflows)

    @property
    def kv_bytes(self) -> int:
        """KV bytes received and verified."""
        return sum(inflow.kv_bytes for inflow in self._inflows.values())

    @property
    def description(self) -> bytes:
        """The description, which the first of P's sending ranks has put into its commit."""
        return min(self._inflows.values(), key=lambda inflow: inflow.source.rank).description

    def accepts_from(self, link: int) -> bool:
        """Return whether `link` may send messages about this ticket; before it is opened, any link may."""
        return link in self._inflows or not self._inflows

    def open(
        self, link: int, source: SendingRank, num_tokens: int, first_token: int, now: float, *, receipt: bool = False
    ) -> None:
        """Bind one rank of P to its link; with `receipt` that rank must send one before the share is ready.

        Raises HandoffFailed for an unknown sender or a different token range.
        """
        known = self._inflows.get(link)
        if self.over or (known is None and not self._is_expected(source)):
            why = f": {self.reason}" if self.reason else ""
            raise HandoffFailed(f"ticket {self.ticket_id} is {self.state} and cannot be opened here by {source}{why}")
        if (num_tokens, first_token) != (self.num_tokens, self.first_token):
            raise HandoffFailed(
                f"tokens [{self.first_token}, {self.num_tokens}) are expected, "
                f"but [{first_token}, {num_tokens}) were offered"
            )
        if known is None:
            self._owed = self._senders.of(source.rank.of)
            terms = Terms(self._owed[source.rank.number], first_token, num_tokens)
            self._inflows[link] = Inflow(source, terms, now + self._lease_s, receipt=receipt)
        self.state = ReceiverState.RECEIVING
        self._lease_end = max(self._lease_end, now + self._lease_s)
        self.renew(link, now)

    def renew(self, link: int, now: float) -> None:
        """Renew the lease of one link, or that of the whole ticket if no rank of P has opened it yet."""
        inflow = self._inflows.get(link)
        if inflow is not None:
            inflow.lease_end = max(inflow.lease_end, now + self._lease_s)
        elif not self._inflows:
            self._lease_end = max(self._lease_end, now + self._lease_s)

    def arrives(self, link: int, now: float) -> None:
        """Record that bytes of a frame arrived on one link: until it is complete, no renewal or commit can arrive."""
        if link in self._inflows:
            self.renew(link, now)
            self.progress += 1

    def is_renewal_time(self, now: float) -> bool:
        """Return whether a third of the lease has passed since progress was last reported to the senders."""
        return not self.over and now >= self._reported_at + self._lease_s / 3

    def renewals_due(self, now: float, progress: int) -> tuple[int, ...]:
        """Return the links to send a renewal on: at every third of the lease while `progress` grows.

        `progress` is that of all ranks: a sender that is done waits for the slowest of them.
        """
        if progress <= self._reported or not self.is_renewal_time(now):
            return ()
        self._reported, self._reported_at = progress, now
        return self.links

    def accept(self, frame: Frame, link: int) -> FrameVerdict:
        """Check an announced frame before a byte is moved. Raises HandoffFailed if it violates the ticket's terms."""
        inflow = self._inflow_of(link, frame.epoch)
        verdict = FrameVerdict.DROP if inflow is None else inflow.accept(frame)
        self._moving += verdict is FrameVerdict.MOVE
        return verdict

    def finish(self, link: int, number: int, digest: int | None, now: float) -> MoveResult:
        """Check the digest of a moved frame (None: interrupted). Raises HandoffFailed at the second mismatch."""
        self._moving -= 1
        if self.over or digest is None:
            return MoveResult.OVER
        inflow = self._inflows[link]
        progress = inflow.finish(number, digest)
        if progress is MoveResult.VERIFIED:
            inflow.lease_end = max(inflow.lease_end, now + self._lease_s)
            self.progress += 1
        return progress

    def propose(self, commit: Commit, link: int) -> FrameVerdict:
        """Record the sender's commit; it takes effect once `ready`. Raises HandoffFailed if frames are missing."""
        inflow = self._inflow_of(link, commit.epoch)
        verdict = FrameVerdict.DROP if inflow is None else inflow.propose(commit)
        self._proposed |= verdict is FrameVerdict.MOVE
        return verdict

    def ready(self) -> bool:
        """Return whether every sending rank of P has committed, every frame is received, and no receipt is missing.

        Raises HandoffFailed if the sums of one rank differ from those in its commit.
        """
        return self._is_complete() and not any(inflow.owes_receipt for inflow in self._inflows.values())

    def request_receipts(self, now: float) -> tuple[int, ...]:
        """Return the links to request the receipt on now: each once, when the frames of all links are received.

        Raises HandoffFailed if the sums of one rank differ from those in its commit.
        """
        if not self._is_complete():
            return ()
        return tuple(link for link, inflow in self._inflows.items() if inflow.request_receipt(now + self._lease_s))

    def held(self, link: int, epoch: int) -> bool:
        """Record one link's receipt; return False if it was not requested, or is a duplicate."""
        inflow = self._inflow_of(link, epoch)
        return inflow is not None and inflow.held()

    @property
    def proposed(self) -> bool:
        """Whether a rank of P has sent its commit: only then can the last frame make it ready."""
        return self._proposed

    def begin_commit(self) -> None:
        """Until `settle` the ticket can neither end nor expire."""
        assert self.ready()
        self._committing = True

    def settle(self, refusal: str | None) -> None:
        """Record that the owner accepted the blocks, or why it refused them."""
        assert self._committing
        self._committing = False
        self.state = ReceiverState.COMMITTED if refusal is None else ReceiverState.ABORTED
        self.reason = refusal or ""

    def abort(self, reason: str) -> bool:
        """End the ticket; return False if it had ended or is being committed."""
        return self._end(ReceiverState.ABORTED, reason)

    def expire(self, now: float) -> bool:
        """End the ticket if a lease has expired.

        The leases that count: that of each rank of P that still owes something, and the ticket's own until all ranks of
        P have opened it.
        """
        ends = [inflow.lease_end for inflow in self._inflows.values() if inflow.waits_for_sender]
        if not self._inflows or len(self._inflows) < len(self._owed):
            ends.append(self._lease_end)
        if all(now < end for end in ends):
            return False
        return self._end(ReceiverState.EXPIRED, f"no renewal within the lease of {self._lease_s:g} s")

    def take_release(self) -> bool:
        """Return True exactly once, after an abort or expiry and the last move: the blocks are free then."""
        if self.state not in (ReceiverState.ABORTED, ReceiverState.EXPIRED) or self._moving or self._released:
            return False
        self._released = True
        return True

    def _is_expected(self, source: SendingRank) -> bool:
        """Return whether this rank of P sends here, and the ticket belongs to no other sender."""
        if source.rank.number not in self._senders.of(source.rank.of):
            return False
        others = [inflow.source for inflow in self._inflows.values()]
        process = source.sender_id, source.epoch, source.rank.of
        return all((one.sender_id, one.epoch, one.rank.of) == process and one.rank != source.rank for one in others)

    def _is_complete(self) -> bool:
        if self.over or self._committing or not any(inflow.committed for inflow in self._inflows.values()):
            return False
        complete = [inflow.check_complete() for inflow in self._inflows.values()]
        return all(complete) and len(complete) == len(self._owed)

    def _inflow_of(self, link: int, epoch: int) -> Inflow | None:
        mine = self.state is ReceiverState.RECEIVING and epoch == self.epoch
        return self._inflows.get(link) if mine else None

    def _end(self, state: ReceiverState, reason: str) -> bool:
        if self.over or self._committing:
            return False
        self.state, self.reason = state, reason
        self.stop.set()
        return True
