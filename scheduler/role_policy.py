"""`--roles auto`: every second, compare the split of roles with all others; change roles if one is clearly better.

A change needs the same direction `_NUM_AGREEING` times in a row and a pause of `_REST_S` after the last change, so that
a short burst changes little and roles do not oscillate (load/role_split.py has the margin). If a role has no living
instance, there is no pause.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean

from scheduler.admission import Admission
from scheduler.grants import Placer
from scheduler.load.loads import InstanceLoad
from scheduler.load.path_costs import known_cost
from scheduler.load.role_split import Demand, better_split
from scheduler.placement import HANDOFF
from scheduler.registry import Registry
from scheduler.role_changes import RoleRefused, change_role
from telemetry.logs import EventLogger
from wire.errors import PdserveError
from wire.step_cost import StepCost
from wire.types import Role

_log = EventLogger("roles")

_ROUND_S = 1.0
_WINDOW_S = 15.0
"""The time over which demand is averaged, and within which waiting prompts should be served."""
_NUM_AGREEING = 5
_REST_S = 20.0


class RolePolicy:
    """Owner of the measured demand and of the last change's time. Combined instances and workers keep their role."""

    def __init__(self, registry: Registry, placer: Placer, admission: Admission) -> None:
        self._registry, self._placer, self._admission = registry, placer, admission
        self._demand = Demand()
        self._seen = (0, 0)
        self._fixed: set[int] = set()  # instances, by index, that cannot have another role
        self._wanted = self._num_agreeing = 0
        self._changed_at = float("-inf")

    async def run(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await asyncio.sleep(_ROUND_S)
            loads = [one for one in self._registry.loads() if _may_change(one)]
            wanted = self._better_split(loads, {one.index: known_cost(one, loads) for one in loads})
            self._num_agreeing = self._num_agreeing + 1 if wanted * self._wanted > 0 else 1
            self._wanted = wanted
            rested_s = asyncio.get_running_loop().time() - self._changed_at
            may_change = rested_s >= _REST_S or not self._registry.has_path()
            if wanted and self._num_agreeing >= _NUM_AGREEING and may_change:
                await self._change(loads, abs(wanted), Role.PREFILL if wanted > 0 else Role.DECODE)

    def _better_split(self, loads: Sequence[InstanceLoad], costs: dict[int, StepCost]) -> int:
        """Measure the demand; return how many prefill instances to add, negative to remove."""
        prompts, tokens = self._placer.num_prompts, self._placer.num_tokens
        (seen_prompts, seen_tokens), self._seen = self._seen, (prompts, tokens)
        outputs = sum(_outputs_per_s(one, costs[one.index]) for one in loads)
        now = Demand((prompts - seen_prompts) / _ROUND_S, (tokens - seen_tokens) / _ROUND_S, outputs)
        self._demand = measured = self._demand.moved_to(now, _ROUND_S / _WINDOW_S)
        num_prefill = sum(one.role is Role.PREFILL for one in loads)
        if not 0 < num_prefill < len(loads):  # a role is lost, unless its instances have not started yet
            return 0 if len(loads) < 2 or not self._registry.was_ready else -1 if num_prefill else 1
        busiest = costs[max(loads, key=attrgetter("streams")).index]  # others decoded fewer sequences at once
        cost = replace(busiest, token_s=fmean(cost.token_s for cost in costs.values()))
        waiting = self._admission.num_waiting / _WINDOW_S
        wanted = Demand(
            measured.prompts + waiting,
            measured.prompt_tokens + self._admission.waiting_tokens / _WINDOW_S,
            measured.outputs + waiting * (measured.outputs / measured.prompts if measured.prompts else 0.0),
        )
        return better_split(
            wanted, cost, num_prefill, len(loads) - num_prefill, min(one.max_num_seqs for one in loads)
        )  # fmt: skip

    async def _change(self, loads: Sequence[InstanceLoad], num: int, role: Role) -> None:
        """Give the role to `num` instances that have the other one, those with the least work first."""
        others = [one for one in loads if one.role is not role and one.index not in self._fixed]
        for one in sorted(others, key=lambda one: (one.streams, one.outstanding_tokens))[:num]:
            try:
                await change_role(self._registry, one.name, role)
            except RoleRefused as error:
                _log.info("role_kept", instance=one.name, role=one.role, why=error)
                self._fixed.add(one.index)
            except PdserveError as error:
                _log.warning("role_not_changed", instance=one.name, role=one.role, why=error)
            else:
                self._changed_at, self._num_agreeing = asyncio.get_running_loop().time(), 0


def _may_change(one: InstanceLoad) -> bool:
    return one.role is not Role.COMBINED and one.path == HANDOFF and not one.is_suspect


def _outputs_per_s(one: InstanceLoad, cost: StepCost) -> float:
    step_s = cost.decode_s(one.streams)
    return one.streams / step_s if step_s else 0.0
