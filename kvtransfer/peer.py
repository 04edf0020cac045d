"""All links of the sender to one instance: which of them a ticket goes to."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvtransfer.link import Link
from kvtransfer.link_ops import Begin, LinkSettings, Lost, Tend
from wire.errors import PdserveError
from wire.types import LinkStatus, Ticket


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One life of one instance's process, as a ticket names it."""

    instance_id: str
    epoch: int


def key_of(ticket: Ticket) -> PeerKey:
    """Return whom the ticket is of."""
    return PeerKey(ticket.instance_id, ticket.epoch)


class Peer:
    """Owner of the links to one life of one instance. Used under the sender's lock."""

    def __init__(self, settings: LinkSettings, key: PeerKey, link_epochs: Iterator[int]) -> None:
        self.key = key
        self._settings = settings
        self._link_epochs = link_epochs
        self._link: Link | None = None

    def begin(self, ticket: Ticket) -> Link:
        """Choose the link for a ticket, dialling one if need be, open the ticket on it and return it."""
        op = Begin(ticket)
        if self._link is None or not self._link.begin(op):
            self._link = self._dial(ticket, self._link)
            self._link.begin(op)
            self._link.thread.start()
        return self._link

    def status(self) -> LinkStatus | None:
        """The links as they are now; None while there was none."""
        return None if self._link is None else self._link.status()

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to this instance."""
        return 0 if self._link is None else self._link.bytes_sent

    def tend(self) -> None:
        """Make every link look at its leases now."""
        if self._link is not None:
            self._link.post(Tend())

    def end(self, error: PdserveError | None) -> None:
        """End every link: in peace when `error` is None."""
        if self._link is not None:
            self._link.post(Lost(error))

    def join(self, timeout_s: float) -> None:
        """Wait for the threads; a peer that holds them up is cut half-way."""
        if self._link is not None:
            self._link.join(timeout_s)

    def _dial(self, ticket: Ticket, old: Link | None) -> Link:
        return Link(
            self._settings, self.key.instance_id, self.key.epoch, next(self._link_epochs), ticket.endpoints,
            bytes_sent=0 if old is None else old.bytes_sent, failures=0 if old is None else old.status().failures,
        )  # fmt: skip
