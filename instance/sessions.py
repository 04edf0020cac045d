"""The open sessions of an instance: one for each scheduler that uses it."""

from collections.abc import Callable
from types import MappingProxyType

from instance.session import InstanceSession
from telemetry.logs import EventLogger
from wire.errors import Incompatible
from wire.load import LoadSnapshot
from wire.messages import Event, Heartbeat, OpenSession
from wire.shared_limits import MAX_SCHEDULERS

_log = EventLogger("instance")


class Sessions:
    """Owner of the open sessions. Its methods run on the event loop's thread, `emit` and `share_load` on any.

    The prompts of a session belong to it alone (instance/workers.py): its end does not affect the others.
    """

    def __init__(self, instance_id: str, load: Callable[[], LoadSnapshot]) -> None:
        self._instance_id, self._load = instance_id, load
        self._by_scheduler = MappingProxyType[str, InstanceSession]({})  # replaced at each change: threads read it

    @property
    def any_open(self) -> bool:
        """Whether a scheduler has an open session."""
        return bool(self._by_scheduler)

    def make_room(self, hello: OpenSession) -> None:
        """End an older session of the same scheduler.

        Raises Incompatible for an older epoch, or one scheduler too many.
        """
        old = self._by_scheduler.get(hello.scheduler_id)
        if old is not None:
            if old.hello.epoch > hello.epoch:
                raise Incompatible(f"session epoch {hello.epoch} is older than the open session's, {old.hello.epoch}")
            old.lost()
        elif len(self._by_scheduler) >= MAX_SCHEDULERS:
            raise Incompatible(
                f"{self._instance_id} has sessions with {len(self._by_scheduler)} schedulers (limit {MAX_SCHEDULERS}); "
                f"scheduler {hello.scheduler_id} must wait until one of them is gone"
            )

    def add(self, session: InstanceSession) -> None:
        """Add a session: from now on it gets the events that are sent to all sessions."""
        self._by_scheduler = MappingProxyType({**self._by_scheduler, session.hello.scheduler_id: session})

    def remove(self, session: InstanceSession) -> None:
        """Remove a session that has ended."""
        left = {key: one for key, one in self._by_scheduler.items() if one is not session}
        self._by_scheduler = MappingProxyType(left)

    def emit(self, event: Event, *, but: InstanceSession | None = None) -> None:
        """Emit an event to every session except `but`."""
        for session in self._by_scheduler.values():
            if session is not but:
                session.emit(event)

    def share_load(self) -> None:
        """Report the load at once if there are several sessions: each must see what the others' prompts leave free."""
        if len(self._by_scheduler) > 1:
            self.emit(Heartbeat(self._load()))

    def beat(self) -> None:
        """Send each scheduler a heartbeat; end the session of each that was silent for longer than its lease."""
        for session in tuple(self._by_scheduler.values()):
            try:
                if session.silent_for() > session.hello.lease_s:
                    session.lost()
                else:
                    session.emit(Heartbeat(self._load()))
            except Exception as error:  # noqa: BLE001 - the outermost frame of a heartbeat: the others must be sent
                _log.error("heartbeat_failed", error, error=error)

    def end_all(self) -> None:
        """End all sessions: the instance stops."""
        for session in tuple(self._by_scheduler.values()):
            session.lost()
