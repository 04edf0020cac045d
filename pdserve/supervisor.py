"""Keep the processes of a cluster running: one that dies is restarted, until it dies too often.

up ready ---> tick: died? ---> wait, longer each time ---> started again
                |         `--> too often: given up; if its role has no process left, the cluster ends
                `--> its entry is gone from the table: removed, until the entry returns
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.process_plan import ProcessPlan
from pdserve.processes import Watched
from pdserve.replacement import Phase, describe, phases_of
from pdserve.restarts import RestartLimits, Restarts
from pdserve.run_folder import ProcessRecord, last_lines
from ranktable_tools.worker_kind import VARIABLE as WORKER
from telemetry.start_marks import SESSION, WARM
from wire.errors import Unavailable

_LAST_LINES = 10
_FOLLOWED_S = 600.0
_GIVEN_UP, _REMOVED = "given up", "removed"

Spawn = Callable[[ProcessPlan, bool], Watched]


def _never_serves(record: ProcessRecord) -> bool:
    return False


@dataclass(slots=True)
class _Place:
    """One process of the cluster: the child that runs now, or the time of its restart, or neither (`note`).

    `died_at` is when its last death was noticed, and `phases` are the phases of its replacement since then.
    """

    plan: ProcessPlan
    restarts: Restarts
    child: Watched
    due: float | None = None
    note: str = ""
    died_at: float | None = None
    phases: tuple[Phase, ...] = ()
    replaced_at: float | None = None

    @property
    def record(self) -> ProcessRecord:
        return replace(
            self.child.record, restarts=self.restarts.total, note=self.note, phases=self.phases,
            from_spare=bool(self.phases) and WARM in self.child.marks, replaced_at=self.replaced_at,
        )  # fmt: skip

    @property
    def is_running(self) -> bool:
        """Whether it runs and its replacement, if any, is complete."""
        return not self.note and self.died_at is None


class Supervisor:
    """Owns the children. `spawn` starts one, for the first time or again; `changed` gets the records at each change.

    `belongs` returns whether the table still has a process that ended: only then is it restarted. `serves` returns
    whether a replaced process serves again.
    """

    def __init__(
        self, limits: RestartLimits, spawn: Spawn, say: Callable[[str], None],
        changed: Callable[[tuple[ProcessRecord, ...]], None],
        belongs: Callable[[ProcessPlan], bool] = lambda plan: True,
        serves: Callable[[ProcessRecord], bool] = _never_serves,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._spawn = spawn
        self._say = say
        self._changed = changed
        self._belongs, self._serves = belongs, serves
        self._places: list[_Place] = []
        self._reported: tuple[ProcessRecord, ...] = ()

    @property
    def children(self) -> Sequence[Watched]:
        """The current child of each process."""
        return [place.child for place in self._places]

    @property
    def records(self) -> tuple[ProcessRecord, ...]:
        """The record of each process."""
        return tuple(place.record for place in self._places)

    @property
    def is_calm(self) -> bool:
        """Whether every process that should run does, and none is being replaced."""
        return all(place.note in (_GIVEN_UP, _REMOVED) or place.is_running for place in self._places)

    def start(self, plans: Sequence[ProcessPlan]) -> None:
        """Start all processes, reporting each to `changed`. Raises Unavailable if one cannot be started."""
        for plan in plans:
            try:
                child = self._spawn(plan, False)
            except OSError as error:
                raise Unavailable(f"{plan.name} cannot be started: {error}") from error
            self._places.append(_Place(plan, Restarts(self._limits), child))
            self._report()

    def tick(self, now: float) -> None:
        """Check each process once. Raises Unavailable when the last process of a role is given up."""
        for place in self._places:
            if place.note == _REMOVED:
                self._take_back(place, now)
            elif place.note and place.due is not None and now >= place.due:
                self._start_again(place, now)
            elif not place.note and (end := place.child.ended()) is not None:
                self._on_death(place, end, now)
            elif not place.note and place.died_at is not None:
                self._follow(place, place.died_at, now)
        if self.records != self._reported:  # a process on another machine has moved
            self._report()

    def _follow(self, place: _Place, died_at: float, now: float) -> None:
        """Update the phases of a replacement; a process on another machine reports none."""
        marks, record = place.child.marks, place.child.record
        may_serve = SESSION in marks or record.role == "scheduler" or WORKER in place.plan.env
        does_serve = may_serve and self._serves(record)
        place.phases = phases_of(died_at, marks, now if does_serve else None)
        if does_serve:
            place.replaced_at = time.time()  # for display only; the limits use the monotonic clock
            how = "from the spare" if WARM in marks else "by a new process"
            self._say(f"replaced {place.plan.name} in {now - died_at:.1f} s {how}: {describe(place.phases)}")
        if does_serve or now - died_at > _FOLLOWED_S or not record.is_here:
            place.died_at = None

    def _take_back(self, place: _Place, now: float) -> None:
        if self._belongs(place.plan):
            self._say(f"the entry of {place.plan.name} is in the table again")
            self._start_again(place, now)

    def _remove(self, place: _Place, end: str) -> None:
        place.due, place.note, place.died_at = None, _REMOVED, None
        self._say(f"{end}; its entry is gone from the table: it is not restarted")
        self._report()

    def _on_death(self, place: _Place, end: str, now: float) -> None:
        if not self._belongs(place.plan):
            self._remove(place, end)
            return
        place.died_at, place.phases = now, ()
        wait_s = place.restarts.died(now)
        if wait_s is None:
            self._give_up(place, end)
            return
        place.due, place.note = now + wait_s, "starting again"
        limits, number = self._limits, place.restarts.deaths
        self._say(
            f"{end}; starting it again in {wait_s:g} s ({number} of {limits.max_restarts} in {limits.window_s:g} s)"
        )
        self._report()

    def _start_again(self, place: _Place, now: float) -> None:
        if not self._belongs(place.plan):
            self._remove(place, f"{place.plan.name} has ended")
            return
        place.due, place.note = None, ""
        try:
            place.child = self._spawn(place.plan, True)
        except OSError as error:
            self._on_death(place, f"{place.plan.name} cannot be started: {error}", now)
            return
        record = place.child.record
        self._say(f"started {record.name} again" + (f", pid {record.pid}" if record.is_here else ""))
        self._report()

    def _give_up(self, place: _Place, end: str) -> None:
        place.due, place.note = None, _GIVEN_UP
        limits, name, deaths = self._limits, place.plan.name, place.restarts.deaths
        verdict = (
            f"gave up on {name}: it died {deaths} time{'' if deaths == 1 else 's'} in {limits.window_s:g} s "
            f"(limit of restarts: {limits.max_restarts}). {end}"
        )
        lines = last_lines(Path(place.child.record.log), _LAST_LINES)
        self._say("\n  ".join([f"{verdict}; its last lines:", *lines]))
        self._report()
        others = [one for one in self._places if one.note not in (_GIVEN_UP, _REMOVED)]
        if any(one.plan.role == place.plan.role for one in others):
            return
        # others may have its role by now (`pdserve role`)
        if not any(self._serves(one.child.record) for one in others if one.plan.role != "scheduler"):
            raise Unavailable(f"no {place.plan.role} process is running; stopping the cluster: {verdict}")

    def _report(self) -> None:
        self._reported = self.records
        self._changed(self._reported)
