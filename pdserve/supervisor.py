"""Keep the processes of a cluster running: one that dies is started again, until it died too often.

up ready ---> tick: died? ---> wait, longer each time ---> started again
                |         `--> too often: given up, and the end of all where the cluster cannot do without it
                `--> its entry is gone from the table: removed, until it is there again
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.process_plan import ProcessPlan
from pdserve.processes import Watched
from pdserve.restarts import RestartLimits, Restarts
from pdserve.run_folder import ProcessRecord, last_lines
from wire.errors import Unavailable

_LAST_LINES = 10
_GIVEN_UP, _REMOVED = "given up", "removed"

Spawn = Callable[[ProcessPlan, bool], Watched]


@dataclass(slots=True)
class _Place:
    """One process of the cluster: the child that runs now, or when the next one is due, or neither: see `note`."""

    plan: ProcessPlan
    restarts: Restarts
    child: Watched
    due: float | None = None
    note: str = ""

    @property
    def record(self) -> ProcessRecord:
        return replace(self.child.record, restarts=self.restarts.total, note=self.note)


class Supervisor:
    """Owns the children from the first start on. `spawn` starts one, anew or again; `changed` is told who there is.

    `belongs` says whether the table still has one that ended: only then it is started again.
    """

    def __init__(
        self, limits: RestartLimits, spawn: Spawn, say: Callable[[str], None],
        changed: Callable[[tuple[ProcessRecord, ...]], None],
        belongs: Callable[[ProcessPlan], bool] = lambda plan: True,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._spawn = spawn
        self._say = say
        self._changed = changed
        self._belongs = belongs
        self._places: list[_Place] = []
        self._told: tuple[ProcessRecord, ...] = ()

    @property
    def children(self) -> Sequence[Watched]:
        """The processes as they were started last."""
        return [place.child for place in self._places]

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
        if self._records() != self._told:  # one that runs elsewhere has moved
            self._tell()

    def _take_back(self, place: _Place, now: float) -> None:
        if self._belongs(place.plan):
            self._say(f"the entry of {place.plan.name} is in the table again")
            self._start_again(place, now)

    def _remove(self, place: _Place, end: str) -> None:
        place.due, place.note = None, _REMOVED
        self._say(f"{end}; its entry is gone from the table: it is not started again")
        self._tell()

    def _died(self, place: _Place, end: str, now: float) -> None:
        if not self._belongs(place.plan):
            self._remove(place, end)
            return
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

    def _records(self) -> tuple[ProcessRecord, ...]:
        return tuple(place.record for place in self._places)

    def _tell(self) -> None:
        self._told = self._records()
        self._changed(self._told)
