"""Log who goes by another global table than the scheduler: a warning where that lasts, and a word when it is over."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.instances import Instance
from telemetry.logs import EventLogger

log = EventLogger("table")

AGREE_S = 10.0
"""Files are copied by hand and by kubelets: only what still differs after this is worth a warning."""


@dataclass(slots=True)
class _Apart:
    """One life of an instance that goes by another table: since when, and the digest that was told."""

    name: str
    since: float
    told: str = ""


class TableAgreement:
    """Owns what was logged of each instance. Does no I/O but the log's; `now` is a clock's."""

    def __init__(self) -> None:
        self._apart: dict[tuple[int, int], _Apart] = {}

    def look(self, living: Sequence[Instance], digest: str, now: float) -> None:
        """Compare the tables of those that live with the one in use, of this digest; say what is new."""
        before, self._apart = self._apart, {}
        for instance in living:
            key = instance.index, instance.description.epoch
            apart = before.pop(key, None)
            if instance.table_digest != digest:
                self._apart[key] = apart or _Apart(instance.name, now)
                self._warn(self._apart[key], instance.table_digest, digest, now)
            elif apart is not None and apart.told:
                log.info("table_agrees", instance=instance.name, digest=digest)

    def _warn(self, apart: _Apart, there: str, here: str, now: float) -> None:
        told = f"{there} {here}"
        if now - apart.since < AGREE_S or apart.told == told:
            return
        apart.told = told
        mend = "copy the scheduler's global table to its host: at a start, tables that differ are an error"
        log.warning("table_differs", instance=apart.name, there=there, here=here, mend=mend)
