"""The receiver's half of a hand-off. Pure: no I/O, no lock, and time is a number passed in.

    RESERVED -> RECEIVING -> COMMITTED            (the first two also -> ABORTED | EXPIRED)

Everything is idempotent by (ticket id, epoch, frame number). Each side counts its lease on its own clock. With several
ranks each rank of D has its share of a ticket, and rank 0 settles them together (quorum.py). The other half:
sender_ticket.py.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvtransfer.digest import StopFlag
from kvtransfer.frame import Commit, Frame
from kvtransfer.inflow import FrameVerdict, Inflow, MoveResult, SendingRank
from kvtransfer.ranks import Senders
from kvtransfer.slots import Windows
from kvtransfer.terms import RankHeads, Terms
from wire.errors import HandoffFailed


class ReceiverState(StrEnum):
    """Where the receiver's half of a ticket is."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class ReceiverTicket:
    """The receiver's half of one ticket on one rank: what each rank of P that sends to it has sent over its link.

    A move runs outside every lock, so the ticket may end under it: `take_release` then says False until the move is
    finished, and True exactly once after that. `stop` cuts such a move short.
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
        self._owed: Mapping[int, RankHeads] = {}  # by P rank, known from the first opening on
        self._inflows: dict[int, Inflow] = {}  # by link
        self._moving = 0
        self._proposed = self._committing = False
        self._released = False
        self._lease_s = lease_s
        self._lease_end = now + lease_s
        self.progress = 0
        self._told, self._told_at = 0, now

    @property
    def over(self) -> bool:
        """Whether the ticket has ended, well or not."""
        return self.state not in (ReceiverState.RESERVED, ReceiverState.RECEIVING)

    @property
    def committing(self) -> bool:
        """Whether everything is in and rank 0 has not settled yet: it cannot end by itself."""
        return self._committing

    @property
    def links(self) -> tuple[int, ...]:
        """The links it was opened on."""
        return tuple(self._inflows)

    @property
    def kv_bytes(self) -> int:
        """KV bytes in and verified."""
        return sum(inflow.kv_bytes for inflow in self._inflows.values())

    @property
    def description(self) -> bytes:
        """What the accepted commits say the prompt is: the first of P's ranks that send here tells."""
        return min(self._inflows.values(), key=lambda inflow: inflow.source.rank).description

    def listens_to(self, link: int) -> bool:
        """Whether what comes over `link` may concern it: before it is opened any link may speak."""
        return link in self._inflows or not self._inflows

    def open(
        self, link: int, source: SendingRank, num_tokens: int, first_token: int, now: float, *, receipt: bool = False
    ) -> None:
        """Bind one rank of P to its link; with `receipt` it owes one before all is in.

        Raises HandoffFailed for a stranger and for other tokens.
        """
        known = self._inflows.get(link)
        if self.over or (known is None and not self._is_awaited(source)):
            why = f": {self.reason}" if self.reason else ""
            raise HandoffFailed(f"ticket {self.ticket_id} is {self.state} and cannot be opened here by {source}{why}")
        if (num_tokens, first_token) != (self.num_tokens, self.first_token):
            raise HandoffFailed(
                f"tokens [{self.first_token}, {self.num_tokens}) are wanted, [{first_token}, {num_tokens}) are offered"
            )
        if known is None:
            self._owed = self._senders.of(source.rank.of)
            terms = Terms(self._owed[source.rank.number], first_token, num_tokens)
            self._inflows[link] = Inflow(source, terms, now + self._lease_s, receipt=receipt)
        self.state = ReceiverState.RECEIVING
        self._lease_end = max(self._lease_end, now + self._lease_s)
        self.renew(link, now)

    def renew(self, link: int, now: float) -> None:
        """Start the lease anew for what comes over one link; for the whole ticket before it is opened."""
        inflow = self._inflows.get(link)
        if inflow is not None:
            inflow.lease_end = max(inflow.lease_end, now + self._lease_s)
        elif not self._inflows:
            self._lease_end = max(self._lease_end, now + self._lease_s)

    def arrives(self, link: int, now: float) -> None:
        """Bytes of some frame come over one link: until it is in, nothing else can, no renewal and no commit either."""
        if link in self._inflows:
            self.renew(link, now)
            self.progress += 1

    def is_renewal_time(self, now: float) -> bool:
        """Whether a third of the lease is over since the links were told that the ticket goes on."""
        return not self.over and now >= self._told_at + self._lease_s / 3

    def renewals_due(self, now: float, progress: int) -> tuple[int, ...]:
        """Return the links to be told that the ticket goes on: every third of the lease while `progress` grows.

        It is that of all ranks: a sender that is done waits for the slowest of them.
        """
        if progress <= self._told or not self.is_renewal_time(now):
            return ()
        self._told, self._told_at = progress, now
        return self.links

    def accept(self, frame: Frame, link: int) -> FrameVerdict:
        """Judge an announced frame before a byte moves. Raises HandoffFailed if it breaks the ticket's terms."""
        inflow = self._speaks(link, frame.epoch)
        verdict = FrameVerdict.DROP if inflow is None else inflow.accept(frame)
        self._moving += verdict is FrameVerdict.MOVE
        return verdict

    def finish(self, link: int, number: int, digest: int | None, now: float) -> MoveResult:
        """Take the digest of a moved frame (None: the move was cut short). Raises HandoffFailed at the second miss."""
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
        """Take the sender's commit; `ready` tells when it is granted. Raises HandoffFailed if frames are missing."""
        inflow = self._speaks(link, commit.epoch)
        verdict = FrameVerdict.DROP if inflow is None else inflow.propose(commit)
        self._proposed |= verdict is FrameVerdict.MOVE
        return verdict

    def ready(self) -> bool:
        """Tell whether every rank of P that sends here has committed, every frame is in, and no receipt is owed.

        Raises HandoffFailed when the sums of one differ.
        """
        return self._is_all_in() and not any(inflow.owes_receipt for inflow in self._inflows.values())

    def ask(self, now: float) -> tuple[int, ...]:
        """Return the links whose receipt is to be asked for now: each once, when everything of all links is in.

        Raises HandoffFailed when the sums of one differ.
        """
        if not self._is_all_in():
            return ()
        return tuple(link for link, inflow in self._inflows.items() if inflow.ask(now + self._lease_s))

    def held(self, link: int, epoch: int) -> bool:
        """Take the receipt of one link; False for one that was not asked for, or is there."""
        inflow = self._speaks(link, epoch)
        return inflow is not None and inflow.held()

    @property
    def proposed(self) -> bool:
        """Whether a rank of P has sent its commit: only then can the last frame make it ready."""
        return self._proposed

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
        """End the ticket if a lease ran out: of a rank of P that still owes something, or that never came."""
        ends = [inflow.lease_end for inflow in self._inflows.values() if inflow.waits_for_sender]
        if not self._inflows or len(self._inflows) < len(self._owed):
            ends.append(self._lease_end)
        if all(now < end for end in ends):
            return False
        return self._end(ReceiverState.EXPIRED, f"no renewal within the lease of {self._lease_s:g} s")

    def take_release(self) -> bool:
        """Tell exactly once, after a bad ending and the last move, that the blocks are free."""
        if self.state not in (ReceiverState.ABORTED, ReceiverState.EXPIRED) or self._moving or self._released:
            return False
        self._released = True
        return True

    def _is_awaited(self, source: SendingRank) -> bool:
        """Whether this rank of P sends here, and the ticket is no other sender's."""
        if source.rank.number not in self._senders.of(source.rank.of):
            return False
        others = [inflow.source for inflow in self._inflows.values()]
        life = source.sender_id, source.epoch, source.rank.of
        return all((one.sender_id, one.epoch, one.rank.of) == life and one.rank != source.rank for one in others)

    def _is_all_in(self) -> bool:
        if self.over or self._committing or not any(inflow.committed for inflow in self._inflows.values()):
            return False
        complete = [inflow.check_complete() for inflow in self._inflows.values()]
        return all(complete) and len(complete) == len(self._owed)

    def _speaks(self, link: int, epoch: int) -> Inflow | None:
        mine = self.state is ReceiverState.RECEIVING and epoch == self.epoch
        return self._inflows.get(link) if mine else None

    def _end(self, state: ReceiverState, reason: str) -> bool:
        if self.over or self._committing:
            return False
        self.state, self.reason = state, reason
        self.stop.set()
        return True
