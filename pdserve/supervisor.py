"""Keep the processes of a cluster running: one that dies is started again, until it died too often.

up ready ---> tick: died? ---> wait, longer each time ---> started again
                |         `--> too often: given up, and the end of all where the cluster cannot do without it
                `--> its entry is gone from the table: removed, until it is there again
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
from telemetry.start_marks import SESSION, WARM
from wire.errors import Unavailable

_LAST_LINES = 10
_FOLLOWED_S = 600.0
_GIVEN_UP, _REMOVED = "given up", "removed"

Spawn = Callable[[ProcessPlan, bool], Watched]


def _nowhere(record: ProcessRecord) -> bool:
    return False


@dataclass(slots=True)
class _Place:
    """One process of the cluster: the child that runs now, or when the next one is due, or neither: see `note`.

    `seen_dead` is when the death was seen that its last replacement began with, and `phases` how far that is.
    """

    plan: ProcessPlan
    restarts: Restarts
    child: Watched
    due: float | None = None
    note: str = ""
    seen_dead: float | None = None
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
        """Whether it runs, and is not being replaced."""
        return not self.note and self.seen_dead is None


class Supervisor:
    """Owns the children from the first start on. `spawn` starts one, anew or again; `changed` is told who there is.

    `belongs` says whether the table still has one that ended: only then it is started again. `serves` says whether one
    that was replaced is in use again.
    """

    def __init__(
        self, limits: RestartLimits, spawn: Spawn, say: Callable[[str], None],
        changed: Callable[[tuple[ProcessRecord, ...]], None],
        belongs: Callable[[ProcessPlan], bool] = lambda plan: True,
        serves: Callable[[ProcessRecord], bool] = _nowhere,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._spawn = spawn
        self._say = say
        self._changed = changed
        self._belongs, self._serves = belongs, serves
        self._places: list[_Place] = []
        self._told: tuple[ProcessRecord, ...] = ()

    @property
    def children(self) -> Sequence[Watched]:
        """The processes as they were started last."""
        return [place.child for place in self._places]

    @property
    def records(self) -> tuple[ProcessRecord, ...]:
        """Return what names the processes, and what becomes of them."""
        return tuple(place.record for place in self._places)

    @property
    def is_calm(self) -> bool:
        """Whether all processes run that are to run, and none is being replaced."""
        return all(place.note in (_GIVEN_UP, _REMOVED) or place.is_running for place in self._places)

    def start(self, plans: Sequence[ProcessPlan]) -> None:
        """Start all processes, each known to `changed` from its start on. Raises Unavailable where one cannot be."""
        for plan in plans:
            try:
                child = self._spawn(plan, False)
            except OSError as error:
                raise Unavailable(f"{plan.name} cannot be started: {error}") from error
            self._places.append(_Place(plan, Restarts(self._limits), child))
            self._tell()

    def tick(self, now: float) -> None:
        """Look at each process once. Raises Unavailable when one is given up that the cluster cannot be without."""
        for place in self._places:
            if place.note == _REMOVED:
                self._take_back(place, now)
            elif place.note and place.due is not None and now >= place.due:
                self._start_again(place, now)
            elif not place.note and (end := place.child.ended()) is not None:
                self._died(place, end, now)
            elif not place.note and place.seen_dead is not None:
                self._follow(place, place.seen_dead, now)
        if self.records != self._told:  # one that runs elsewhere has moved
            self._tell()

    def _follow(self, place: _Place, seen_dead: float, now: float) -> None:
        """Look how far a replacement is; of one that runs elsewhere nothing is known."""
        marks, record = place.child.marks, place.child.record
        may_serve = SESSION in marks or record.role == "scheduler"
        does_serve = may_serve and self._serves(record)
        place.phases = phases_of(seen_dead, marks, now if does_serve else None)
        if does_serve:
            place.replaced_at = time.time()  # for whoever reads it, no limit is counted by it
            how = "from the spare" if WARM in marks else "by a new process"
            self._say(f"replaced {place.plan.name} in {now - seen_dead:.1f} s {how}: {describe(place.phases)}")
        if does_serve or now - seen_dead > _FOLLOWED_S or not record.is_here:
            place.seen_dead = None

    def _take_back(self, place: _Place, now: float) -> None:
        if self._belongs(place.plan):
            self._say(f"the entry of {place.plan.name} is in the table again")
            self._start_again(place, now)

    def _remove(self, place: _Place, end: str) -> None:
        place.due, place.note, place.seen_dead = None, _REMOVED, None
        self._say(f"{end}; its entry is gone from the table: it is not started again")
        self._tell()

    def _died(self, place: _Place, end: str, now: float) -> None:
        if not self._belongs(place.plan):
            self._remove(place, end)
            return
        place.seen_dead, place.phases = now, ()
        wait_s = place.restarts.died(now)
        if wait_s is None:
            self._give_up(place, end)
            return
        place.due, place.note = now + wait_s, "starting again"
        limits, number = self._limits, place.restarts.deaths
        self._say(f"{end}; starting it again in {wait_s:g} s ({number} of {limits.most} in {limits.window_s:g} s)")
        self._tell()

    def _start_again(self, place: _Place, now: float) -> None:
        if not self._belongs(place.plan):
            self._remove(place, f"{place.plan.name} has ended")
            return
        place.due, place.note = None, ""
        try:
            place.child = self._spawn(place.plan, True)
        except OSError as error:
            self._died(place, f"{place.plan.name} cannot be started: {error}", now)
            return
        record = place.child.record
        self._say(f"started {record.name} again" + (f", pid {record.pid}" if record.is_here else ""))
        self._tell()

    def _give_up(self, place: _Place, end: str) -> None:
        place.due, place.note = None, _GIVEN_UP
        limits, name = self._limits, place.plan.name
        words = (
            f"gave up on {name}: it died {place.restarts.deaths} times in {limits.window_s:g} s "
            f"(limit {limits.most} restarts). {end}"
        )
        lines = last_lines(Path(place.child.record.log), _LAST_LINES)
        self._say("\n  ".join([f"{words}; its last lines:", *lines]))
        self._tell()
        if not any(one.plan.role == place.plan.role and one.note not in (_GIVEN_UP, _REMOVED) for one in self._places):
            raise Unavailable(f"no {place.plan.role} is left, the cluster ends; {words}")

    def _tell(self) -> None:
        self._told = self.records
        self._changed(self._told)
