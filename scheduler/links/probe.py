"""Measure the KV links of all pairs on an operator's request: one pair at a time, for one client at a time."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace

from scheduler.instances import Instance
from scheduler.membership.member import Member
from scheduler.registry import Registry
from wire.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdserveError, Unavailable
from wire.load import LinkStatus
from wire.messages import LinkMeasured, MeasureLink
from wire.types import Role

MAX_MEASURE_BYTES = 256 * 2**20
MEASURE_TIMEOUT_S = 45.0
"""Longer than an instance's own timeout, so that its error is received first."""

_Epochs = tuple[int, int]
"""The epochs of the two processes: a measurement is valid for these only."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One P-D pair of the table. `prefill` and `decode` are the names of the instances, such as `prefill-0`."""

    prefill: str
    decode: str
    sender: Member
    receiver: Member


@dataclass(frozen=True, slots=True)
class PairLink:
    """The state of a pair's link; `link` is its last known status if it could not be measured, and `error` why."""

    pair: Pair
    link: LinkStatus | None
    error: str = ""

    @property
    def not_offered(self) -> tuple[str, ...]:
        """The transports better than the one in use that the sender does not offer, such as `shm: not named`.

        Without a transport in use there are none.
        """
        sender = self.pair.sender.description
        used = "" if self.link is None else self.link.transport
        if sender is None or not used:
            return ()
        better = itertools.takewhile(lambda text: text != used, sender.kv_transports)
        return tuple(text for text in better if ": " in text)

    @property
    def digests(self) -> bool | None:
        """Whether the link's KV frames have digests; None until both ends were reached.

        They have digests unless both ends turned them off.
        """
        ends = (self.pair.sender.description, self.pair.receiver.description)
        digests = [end.kv_digests for end in ends if end is not None]
        return any(digests) if len(digests) == len(ends) else None


class LinkProbe:
    """Owner of the only measurement that may run."""

    def __init__(self, registry: Registry, *, timeout_s: float = MEASURE_TIMEOUT_S) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._busy = False
        self._measured: dict[tuple[int, int], tuple[_Epochs, LinkStatus]] = {}

    def pairs(self) -> list[Pair]:
        """Return all pairs of a prefill and a decode instance, in table order, living or not."""
        named = [(member.expected.name, member) for member in self._registry.members]
        ends = {role: [one for one in named if one[1].role is role] for role in Role}
        return [Pair(p, d, sender, receiver) for p, sender in ends[Role.PREFILL] for d, receiver in ends[Role.DECODE]]

    async def measure(self, num_bytes: int) -> AsyncGenerator[Pair | PairLink]:
        """Yield each pair before it is measured with `num_bytes`, and its link afterwards; 0 bytes measure nothing.

        Raises InvalidRequest for too many bytes and Overloaded while another measurement runs.
        """
        if not 0 <= num_bytes <= MAX_MEASURE_BYTES:
            raise InvalidRequest(f"cannot measure with {num_bytes} bytes: 0 to {MAX_MEASURE_BYTES} are allowed")
        with self._only_measurement():
            for pair in self.pairs():
                yield pair
                yield await self._measure(pair, num_bytes)

    @contextlib.contextmanager
    def _only_measurement(self) -> Iterator[None]:
        if self._busy:
            raise Overloaded("links are already being measured: one measurement at a time")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _measure(self, pair: Pair, num_bytes: int) -> PairLink:
        try:
            sender, receiver = _living_instance(pair.sender), _living_instance(pair.receiver)
        except Unavailable as error:
            return PairLink(pair, None, str(error))
        known, gap = _known_status(sender, receiver), self._registry.kv_pairs.gap(sender.index, receiver.index)
        if gap is not None:
            return PairLink(pair, None, str(gap))  # the sender's last report is about the receiver's previous process
        if num_bytes == 0:
            return PairLink(pair, self._with_measurement(sender, receiver, known))
        try:
            answer = await self._request(sender, receiver, num_bytes)
        except PdserveError as error:
            return PairLink(pair, known, str(error))
        if answer.link is not None:
            self._measured[sender.index, receiver.index] = _epochs_of(sender, receiver), answer.link
        return PairLink(pair, answer.link or known, answer.error)

    def _with_measurement(self, sender: Instance, receiver: Instance, known: LinkStatus | None) -> LinkStatus | None:
        """Add the figures of our last measurement of these two processes if the sender's load has none yet."""
        epochs, last = self._measured.get((sender.index, receiver.index), (None, None))
        if last is None or epochs != _epochs_of(sender, receiver):
            return known
        if known is None or not (known.transport or known.failures):  # reported before the measured link was up
            return last
        if known.round_trip_s or known.bytes_per_s:
            return known
        return replace(known, round_trip_s=last.round_trip_s, bytes_per_s=last.bytes_per_s)

    async def _request(self, sender: Instance, receiver: Instance, num_bytes: int) -> LinkMeasured:
        peer = receiver.description
        busy = f"the link to {peer.instance_id} is being measured"
        with sender.link_answers.expect(peer.instance_id, busy) as answer:
            sender.post(MeasureLink(peer.instance_id, peer.epoch, peer.endpoints, num_bytes))
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await answer
            except TimeoutError:
                raise DeadlineExceeded(f"{sender} did not report on this link within {self._timeout_s:g} s") from None


def _epochs_of(sender: Instance, receiver: Instance) -> _Epochs:
    return sender.description.epoch, receiver.description.epoch


def _living_instance(member: Member) -> Instance:
    if member.instance is None or not member.is_living:
        raise Unavailable(f"{member.expected.address} is {member.state.value}: {member.why}")
    return member.instance


def _known_status(sender: Instance, receiver: Instance) -> LinkStatus | None:
    """Return the sender's last report of this link; a restarted peer has two there for a while."""
    peer_id = receiver.description.instance_id
    links = [link for link in sender.load.links if link.peer_id == peer_id]
    return max(links, key=lambda link: link.state == "up", default=None)
