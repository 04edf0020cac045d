"""All links of the sender to one rank of one process of an instance: chooses the link and transport of each ticket.

    ticket --> least loaded link over the best transport that is up; none: a new link, dialled best first
    beside a loaded link a second link is dialled; while a worse transport is in use, a better one is tried again, or
    tried for the first time if its set-up is slow or it must be measured first

Links of both kinds are spare: no ticket waits for their dial. When a better link is up, the worse ones are drained. A
link that must be measured first is closed again unless it is faster than the one in use. While such a link is in use,
the other transports, which may have failed when it was measured, are tried and measured against it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtransfer.comparison import Comparison, compare
from kvtransfer.dial import out_of_reach
from kvtransfer.health import Change, Health
from kvtransfer.link import Link
from kvtransfer.link_ops import Begin, CheckLeases, LinkSettings, Measure, Measured, PeerKey
from kvtransfer.process_group.devices import device_of
from kvtransfer.transport_interface import Transport
from telemetry.logs import EventLogger
from wire.errors import Incompatible, PdserveError, Unavailable
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket

_log = EventLogger("kvtransfer")
FORGET_AFTER_S = 300.0


class Peer:
    """Owner of the links to one rank of one process of an instance, and of its transports' health. Thread-safe."""

    def __init__(self, settings: LinkSettings, key: PeerKey, link_epochs: Iterator[int]) -> None:
        self.key = key
        self._settings, self._link_epochs = settings, link_epochs
        self._transports = {transport.traits.name: transport for transport in settings.transports}
        self._ranks = {name: rank for rank, name in enumerate(self._transports)}
        self._endpoints: Sequence[KvEndpoint] = ()
        self._lacking: dict[str, str] = {}  # why a transport is unreachable
        traits, device = [transport.traits for transport in settings.transports], device_of(settings.memory)
        self._slow = frozenset(one.name for one in traits if one.is_slow(device))
        self._measured_first = frozenset(one.name for one in traits if one.measured_first)
        self._health = Health([*self._transports], self._measured_first)
        self._links: list[Link] = []  # every link whose threads may be alive
        self._last: Link | None = None  # the link to report if none is alive
        self._trial: Link | None = None  # over a better transport than the one in use; carries no tickets
        self._failures = self._bytes_of_gone = self._resent_of_gone = 0
        self._measured = Measured(0.0, 0.0)
        self._past = (0, 0, 0)  # bytes, failures, fallbacks of this instance's earlier processes
        self._idle_since = settings.clock()
        self._retired = self._closed = False
        self._lock = threading.Lock()

    def begin(self, ticket: Ticket) -> Link:
        """Choose the link for a ticket, dialling one if necessary, open the ticket on it and return it.

        Raises Unavailable if this process cannot start another thread.
        """
        num_bytes = (ticket.num_tokens - ticket.first_token) * self._settings.memory.layout.token_bytes
        return self._move_ticket(ticket.endpoints, lambda link: link.begin(Begin(ticket), num_bytes))

    def measure(
        self, endpoints: Sequence[KvEndpoint], num_bytes: int, deadline: float,
        done: Callable[[LinkStatus | PdserveError], None],
    ) -> None:  # fmt: skip
        """Measure the link that a ticket would use now; `done` is called once, on a thread of that link."""

        def finish(found: Measured | PdserveError) -> None:
            if isinstance(found, PdserveError):
                done(found)
                return
            self._measured = found
            done(self.status())

        self._move_ticket(endpoints, lambda link: link.measure(Measure(num_bytes, deadline, finish)))

    def status(self) -> LinkStatus:
        """Return the current status of the links."""
        with self._lock:
            shown = self._best_link() or self._last
            transport, state = ("", "connecting") if shown is None else (shown.transport, shown.state)
            num_bytes, failures, fallbacks = self._past
            return LinkStatus(
                self.key.instance_id, transport, state, 0 if shown is None else shown.link_epoch,
                num_bytes + self._bytes_sent(), failures + self._failures, fallbacks + self._health.fallbacks,
                self._measured.round_trip_s, self._measured.bytes_per_s, self._why_not_better(transport),
            )  # fmt: skip

    def remember(self, gone: LinkStatus) -> None:
        """Add to this peer's counts those of an earlier process of its instance, which is being forgotten."""
        with self._lock:
            num_bytes, failures, fallbacks = self._past
            self._past = num_bytes + gone.bytes_sent, failures + gone.failures, fallbacks + gone.fallbacks

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to this instance."""
        with self._lock:
            return self._bytes_sent()

    @property
    def frames_resent(self) -> int:
        """Frames that were sent to this instance again."""
        with self._lock:
            return self._resent_of_gone + sum(link.frames_resent for link in self._links)

    @property
    def lost(self) -> bool:
        """Whether it had a link and has none now."""
        with self._lock:
            return self._last is not None and self._best_link() is None

    @property
    def over(self) -> bool:
        """Whether it has no links left, and is retired or has been unused for FORGET_AFTER_S.

        Tickets end with their links, so no ticket refers to it.
        """
        with self._lock:
            if any(link.thread.is_alive() for link in self._links):
                return False
            return self._retired or self._settings.clock() - self._idle_since >= FORGET_AFTER_S

    def check_leases(self) -> None:
        """Make every link check its leases now."""
        for link in self.links():
            link.post(CheckLeases())

    def retire(self) -> None:
        """A newer process of this instance exists: serve the present and late tickets, then close."""
        with self._lock:
            self._retired = True
        for link in self.links():
            link.drain()

    def revive(self) -> None:
        """This process is the instance's newest after all."""
        with self._lock:
            self._retired = False

    def end(self) -> None:
        """Close every link normally."""
        with self._lock:
            self._closed = True
        for link in self.links():
            link.end()

    def links(self) -> list[Link]:
        """Return the links whose threads may be alive."""
        with self._lock:
            self._forget_gone()
            return list(self._links)

    def dial_failed(self, transport: str, reason: str) -> None:
        """A transport failed: it rests (link.LinkOwner)."""
        with self._lock:
            self._health.failed(transport, reason, self._settings.clock())

    def up(self, link: Link) -> None:
        """A link is ready: it takes the tickets, or is first measured against the one in use (link.LinkOwner)."""
        with self._lock:
            used = self._best_up()
            needs_measuring = link is self._trial and self._needs_measuring(link, used)
        if needs_measuring:
            compare(link, used, self._settings.clock, partial(self._compared, link))
        else:
            self._use(link)

    def _compared(self, link: Link, found: Comparison | PdserveError) -> None:
        """Use a link that is faster than the one in use; close one that is not, or that could not be measured."""
        is_faster, now = isinstance(found, Comparison) and found.faster is link, self._settings.clock()
        with self._lock:
            if link is not self._trial:  # it has ended
                return
            if isinstance(found, Comparison):
                self._measured = found.measured
                self._health.slower(found.slower.transport, found.faster.transport, found.reason, now)
            else:
                self._health.failed(link.transport, f"its link was not measured: {found}", now)
            if not is_faster:
                link.drain()
                self._trial = None
        result = f"{found.slower.transport} is {found.reason}" if isinstance(found, Comparison) else found
        _log.info("kv_link_measured", peer=self.key.instance_id, transport=link.transport, result=result)
        if isinstance(found, Comparison) and is_faster:
            self._use(link, slower=found.slower.transport)

    def _needs_measuring(self, link: Link, used: Link | None) -> bool:
        """Return whether the order of these two says nothing about their rates."""
        if link.transport in self._measured_first:
            return True
        return used is not None and used.transport in self._measured_first and self._rank_of(used) < self._rank_of(link)

    def _use(self, link: Link, slower: str = "") -> None:
        """Let the best links take the tickets from now on, and drain the worse ones; `link` is ready.

        Links over the transport `slower` count as worse.
        """
        with self._lock:
            if link.state == "down":  # lost before its comparison was reported
                return
            self._last = link
            self._health.ready(link.transport, self._settings.clock())
            if link is self._trial:
                self._trial = None
            for one in self._links:
                if one.transport == slower:
                    one.drain()
            best = self._best_up()
            if best is None:  # this one is draining already
                return
            worse = [one for one in self._links if one.state == "up" and self._rank_of(one) > self._rank_of(best)]
            change, reasons = self._health.use(best.transport), self._why_not_better(best.transport)
        for one in worse:
            one.drain()
        if change is Change.FALLBACK:
            _log.warning("kv_fallback", peer=self.key.instance_id, transport=best.transport, reason="; ".join(reasons))
        elif change is Change.BACK:
            _log.info("kv_link_back", peer=self.key.instance_id, transport=best.transport)

    def down(self, link: Link, error: PdserveError | None) -> None:
        """A link has ended: its transport rests unless the end was normal or no transport works (link.LinkOwner)."""
        with self._lock:
            self._idle_since = self._settings.clock()
            trial, self._trial = self._trial, None if link is self._trial else self._trial
            if error is None:
                return
            self._failures += link is not trial
            if link.transport or link.spare:
                name = link.transport or link.transports[0].traits.name
                self._health.failed(name, str(error), self._settings.clock())
            elif not isinstance(error, Incompatible):
                self._health.forgive()

    def tick(self) -> None:
        """Try a better transport again when its rest has ended; tickets do not wait for it (link.LinkOwner)."""
        if not self._may_try():  # first without the lock: this is called all the time
            return
        with self._lock:
            name = self._health.due(self._settings.clock()) if self._may_try() else None
            if name is not None:
                self._trial = self._make_spare_link(self._transports[name])

    def _may_try(self) -> bool:
        return self._trial is None and not self._closed and not self._retired

    def _move_ticket(self, endpoints: Sequence[KvEndpoint], take: Callable[[Link], bool]) -> Link:
        """Pass the work to the best link, or to a new one; return that link."""
        with self._lock:
            self._idle_since = self._settings.clock()
            self._update_endpoints(endpoints)
            while (link := self._best_link()) is not None:
                was_loaded = link.load > 0
                if take(link):
                    if was_loaded:
                        self._add_link(link)
                    return link
            names = [*self._dial_order(), *self._lacking]
            link = self._make([self._transports[name] for name in names], spare=False)
            taken = take(link)
            assert taken
            if self._retired:
                link.drain()
            self._start(link)
            return link

    def _dial_order(self) -> Sequence[str]:
        """Return the transports to dial for a ticket: those it can wait for, then those that should be measured first.

        `tick` sets up the better ones next to the resulting link.
        """
        names = kept = list(self._health.order())
        for avoided in (self._measured_first, self._slow):
            kept = [name for name in kept if name not in avoided] or kept
        for name in names:
            if name not in kept:
                self._health.wait_for(name, kept[0], self._settings.clock())
        return [*kept, *(name for name in names if name in self._measured_first and name not in kept)]

    def _update_endpoints(self, endpoints: Sequence[KvEndpoint]) -> None:
        if tuple(endpoints) == tuple(self._endpoints):
            return
        self._endpoints = tuple(endpoints)
        reach = {name: out_of_reach(one, endpoints, self.key.rank.number) for name, one in self._transports.items()}
        self._lacking = {name: why for name, why in reach.items() if why is not None}
        self._health.reach(reach.keys() - self._lacking.keys())

    def _best_link(self) -> Link | None:
        """Return the least loaded link over the best transport; one still connecting only if none is up."""
        connecting = (link for link in self._links if link.state == "connecting" and not link.spare)
        return self._best_up() or min(connecting, key=lambda link: link.load, default=None)

    def _best_up(self) -> Link | None:
        up = [link for link in self._links if link.state == "up" and link is not self._trial]
        best = min(map(self._rank_of, up), default=None)
        return min((link for link in up if self._rank_of(link) == best), key=lambda link: link.load, default=None)

    def _add_link(self, link: Link) -> None:
        """Dial another link beside a loaded one, if its transport supports one."""
        transport = self._transports.get(link.transport)
        if transport is None or self._closed or self._health.rests(link.transport):
            return
        parallel = [one for one in self._links if one.transport == link.transport and one.state in ("connecting", "up")]
        coming = [one for one in self._links if one.spare and one.state == "connecting"]
        if not coming and len(parallel) < min(self._settings.links_per_peer, transport.traits.max_links):
            self._make_spare_link(transport)

    def _make_spare_link(self, transport: Transport) -> Link | None:
        link = self._make([transport], spare=True)
        try:
            self._start(link)
        except Unavailable as error:
            _log.warning("kv_link_not_started", peer=self.key.instance_id, transport=transport.traits.name, error=error)
            return None
        return link

    def _make(self, transports: Sequence[Transport], *, spare: bool) -> Link:
        self._forget_gone()
        return Link(self._settings, self.key, next(self._link_epochs), self._endpoints, transports, self, spare=spare)

    def _start(self, link: Link) -> None:
        try:
            link.thread.start()
        except RuntimeError as error:
            raise Unavailable(f"no thread for a KV link to {self.key.instance_id}: {error}") from error
        self._links.append(link)
        if not link.spare:
            self._last = link

    def _forget_gone(self) -> None:
        gone = [link for link in self._links if not link.thread.is_alive()]
        self._links = [link for link in self._links if link not in gone]
        self._bytes_of_gone += sum(link.bytes_sent for link in gone)
        self._resent_of_gone += sum(link.frames_resent for link in gone)

    def _bytes_sent(self) -> int:
        return self._bytes_of_gone + sum(link.bytes_sent for link in self._links)

    def _rank_of(self, link: Link) -> int:
        return self._ranks[link.transport]

    def _why_not_better(self, transport: str) -> tuple[str, ...]:
        """Return why each better or slower transport is not in use; why none is up if `transport` is empty."""
        better = list(self._transports)[: self._ranks.get(transport)]
        shown = [name for name in self._transports if name in better or self._health.is_slower(name, transport)]
        texts = {name: self._lacking.get(name) or self._health.reason(name) for name in shown}
        return tuple(f"{name}: {text}" for name, text in texts.items() if text)
