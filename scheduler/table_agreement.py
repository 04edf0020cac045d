"""Log which instances do not use the scheduler's global table: a warning if the difference lasts, and its end.

Workers of other engines use no table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.instances import Instance
from telemetry.logs import EventLogger

_log = EventLogger("table")

AGREE_S = 10.0
"""Copying files takes time, by hand or by kubelets: only a difference that lasts longer causes a warning."""


@dataclass(slots=True)
class _Difference:
    """One process of an instance that uses another table: since when, and the digests last logged."""

    name: str
    since: float
    logged: str = ""


class TableAgreement:
    """Owner of the logged differences. Its only I/O is the log; `now` is a clock's time."""

    def __init__(self) -> None:
        self._differences: dict[tuple[int, int], _Difference] = {}

    def compare(self, living: Sequence[Instance], digest: str, now: float) -> None:
        """Compare the living instances' tables with the digest of the one in use; log changes."""
        before, self._differences = self._differences, {}
        for instance in living:
            key = instance.index, instance.description.epoch
            difference = before.pop(key, None)
            if instance.description.worker is None and instance.table_digest != digest:
                self._differences[key] = difference or _Difference(instance.name, now)
                self._warn(self._differences[key], instance.table_digest, digest, now)
            elif difference is not None and difference.logged:
                _log.info("table_agrees", instance=instance.name, digest=digest)

    def _warn(self, difference: _Difference, there: str, here: str, now: float) -> None:
        digests = f"{there} {here}"
        if now - difference.since < AGREE_S or difference.logged == digests:
            return
        difference.logged = digests
        fix = "copy the scheduler's global table to that host: at startup, different tables are an error"
        _log.warning("table_differs", instance=difference.name, there=there, here=here, fix=fix)
