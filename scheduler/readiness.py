"""Whether the cluster can serve: a path accepts new work, and was used recently.

A suspect instance gets no new work: a load balancer sends requests elsewhere, while the instance's streams continue.
A pair too full for a probe counts as used while it progresses: its own long requests block the probe.
"""

import asyncio
import math
from collections.abc import Iterator

from scheduler.limits import ControlLimits
from scheduler.load.loads import InstanceLoad
from scheduler.membership.kv_pairs import UNPROVEN, GapKind, KvGap
from scheduler.model.kind import ModelKind
from scheduler.placement import Plan
from scheduler.registry import Registry
from scheduler.workers.connectors import PATHS
from wire.description import InstanceDescription
from wire.shared_limits import hold_limit
from wire.types import Role

Pair = tuple[int | None, int]
_Epochs = tuple[int | None, ...]
"""The epochs of a pair's processes: an earlier use does not count for processes started later."""


class Readiness:
    """Owner of the time of each pair's last use by a request or probe.

    A model that generates nothing has no pairs: each prefill or combined instance answers alone.
    """

    def __init__(self, registry: Registry, limits: ControlLimits, kind: ModelKind = ModelKind.TEXT) -> None:
        self._registry = registry
        self._is_pooled = kind is not ModelKind.TEXT
        self._limits = limits
        self._tried_at: dict[_Epochs, float] = {}
        self._last_use: dict[Pair, tuple[_Epochs, float]] = {}

    def note_use(self, plan: Plan) -> None:
        """Record that a token arrived over this plan's pair."""
        if plan.prefill is not None:
            self._registry.kv_pairs.note_use(plan.prefill, plan.decode)
        self._last_use[plan.pair] = self._epochs_now(plan), asyncio.get_running_loop().time()
        self._registry.confirm_ready()

    def note_failure(self, plan: Plan) -> None:
        """Record that a request failed on this pair; after too many failures a pair of workers must be proven again."""
        if plan.path not in PATHS.values() or plan.prefill is None:
            return
        living = {one.index for one in self._registry.living()}
        if {plan.prefill, plan.decode} <= living and self._registry.kv_pairs.note_failure(plan.prefill, plan.decode):
            self._registry.changed()

    def names(self, plan: Plan) -> dict[str, str]:
        """Return the names of a plan's instances by role."""
        ends = {"prefill": plan.prefill, "decode": plan.decode}
        return {role: self._registry.name(index) for role, index in ends.items() if index is not None}

    def is_busy(self, plan: Plan) -> bool:
        """Whether the pair is too busy for a probe: an instance is full, and one made a step recently."""
        loads = {load.index: load for load in self._registry.loads() if load.index in plan.pair}
        decode = loads.get(plan.decode)
        is_full = any(load.blocks_free < 1 or _holds_its_share(load) for load in loads.values())
        return (is_full or (decode is not None and _has_no_slot(decode))) and self.progresses(plan)

    def progresses(self, plan: Plan) -> bool:
        """Whether one instance of the pair made a step recently."""
        ends = [one for one in self._registry.living() if one.index in plan.pair]
        return any(one.stepped_within(self._limits.probe_after_s) for one in ends)

    def slowness(self, plan: Plan) -> float:
        """Return the factor by which starvation of either instance slows the pair down."""
        return self._registry.slowness(plan.pair)

    def extend_use(self, plan: Plan) -> None:
        """Extend the last use of this pair, which has no room for a probe but progresses."""
        epochs = self._epochs_now(plan)
        if self._last_use.get(plan.pair, (None, 0.0))[0] == epochs:
            self._last_use[plan.pair] = epochs, asyncio.get_running_loop().time()

    def unproven(self) -> list[KvGap]:
        """Return the pairs of living workers that are due for a proof: each at most once in `refused_retry_s`."""
        now, wait_s = asyncio.get_running_loop().time(), self._limits.refused_retry_s
        self._tried_at = {tried: at for tried, at in self._tried_at.items() if now - at < wait_s}
        epochs = self._living_epochs()
        gaps = [gap for gap in self._registry.gaps() if gap.kind in UNPROVEN]
        return [gap for gap in gaps if (epochs.get(gap.sender), epochs.get(gap.receiver)) not in self._tried_at]

    def set_proof(self, plan: Plan, why: str | None) -> bool:
        """Record the result of a pair's proof: `why` its answers differ, or None; return whether the pair may serve.

        The proof of a combined worker, compared with our own instances, is recorded the same way.
        """
        pairs, decode = self._registry.kv_pairs, plan.decode
        prefill = decode if plan.prefill is None else plan.prefill
        gap = pairs.gap(prefill, decode)
        if gap is None:  # an instance left or came back
            return False
        if why is not None:
            epochs = self._living_epochs()
            self._tried_at[epochs.get(gap.sender), epochs.get(gap.receiver)] = asyncio.get_running_loop().time()
            pairs.disprove(prefill, decode, why)
            return False
        pairs.prove(prefill, decode)
        if plan.prefill is not None:
            self.note_use(plan)
        self._registry.changed()
        return True

    def own_plan(self) -> Plan | None:
        """Return a plan of pdserve's own instances that was used recently, None where there is none."""
        own = {one.index for one in self._registry.living() if one.description.worker is None}
        return next((plan for plan in self._recent_plans() if plan.decode in own), None)

    def decoding_workers(self) -> list[tuple[int, int]]:
        """Return the index and epoch of each living worker that decodes."""
        living = [one for one in self._registry.living() if one.role is not Role.PREFILL]
        return [(one.index, one.description.epoch) for one in living if one.description.worker is not None]

    def doubt(self, decode: int, why: str) -> None:
        """Have the serving pairs of a worker proven again, or the worker itself if it serves alone."""
        roles, pairs = {one.index: one.role for one in self._registry.living()}, self._registry.kv_pairs
        if decode not in roles:
            return
        is_alone = roles[decode] is Role.COMBINED
        for prefill in [decode] if is_alone else [index for index, role in roles.items() if role is Role.PREFILL]:
            if pairs.gap(prefill, decode) is None:
                pairs.disprove(prefill, decode, why, GapKind.UNPROVEN)
        self._registry.changed()

    def description(self, index: int) -> InstanceDescription:
        """Return the description of a living instance. Raises InstanceLost."""
        return self._registry.instance(index).description

    def discard_use(self, plan: Plan) -> None:
        """Discard the last use of this pair after a failed probe."""
        self._last_use.pop(plan.pair, None)

    def ready(self) -> bool:
        """Whether some living pair was used within the window."""
        return any(True for _ in self._recent_plans())

    def due(self) -> list[Plan]:
        """Return the living pairs not used recently, longest ago first."""
        after_s = self._limits.probe_after_s
        ages = {plan: age for plan, age, slowness in self._probe_ages() if age > after_s * slowness}
        return sorted(ages, key=lambda plan: -ages[plan])

    def _recent_plans(self) -> Iterator[Plan]:
        window_s = self._limits.ready_window_s
        return (plan for plan, age, slowness in self._probe_ages() if age <= window_s * slowness)

    def _probe_ages(self) -> Iterator[tuple[Plan, float, float]]:
        """Yield for each living pair the time since its last use (infinity if it was never used) and its slowness."""
        now, epoch_by_index = asyncio.get_running_loop().time(), self._living_epochs()
        slowness = {one.index: one.slowness for one in self._registry.living()}
        for plan in self._living_plans():
            epochs, at = self._last_use.get(plan.pair, (None, 0.0))
            age = now - at if epochs == _epochs_of(plan, epoch_by_index) else math.inf
            yield plan, age, max(slowness[index] for index in plan.pair if index is not None)

    def _epochs_now(self, plan: Plan) -> _Epochs:
        ends = [self._registry.find(index) for index in plan.pair if index is not None]
        return tuple(None if one is None else one.description.epoch for one in ends)

    def _living_epochs(self) -> dict[int, int]:
        return {instance.index: instance.description.epoch for instance in self._registry.living()}

    def living_plans(self) -> list[Plan]:
        """Return a plan for every pair (and combined instance) that accepts new work and can transfer KV."""
        return list(self._living_plans())

    def _living_plans(self) -> Iterator[Plan]:
        living = [instance for instance in self._registry.living() if not instance.is_suspect]
        if self._is_pooled:
            yield from (Plan("pooling", None, i.index, "probe") for i in living if i.role is not Role.DECODE)
            return
        prefills = [instance for instance in living if instance.role is Role.PREFILL]
        decodes = [instance.index for instance in living if instance.role is Role.DECODE]
        yield from (
            Plan(prefill.description.path, prefill.index, decode, "probe")
            for prefill in prefills
            for decode in decodes
            if self._registry.kv_pairs.gap(prefill.index, decode) is None
        )
        yield from (
            Plan("local", None, one.index, "probe")
            for one in living
            if one.role is Role.COMBINED and self._registry.kv_pairs.gap(one.index, one.index) is None
        )


def _epochs_of(plan: Plan, epoch_by_index: dict[int, int]) -> _Epochs:
    return tuple(epoch_by_index.get(index) for index in plan.pair if index is not None)


def _has_no_slot(decode: InstanceLoad) -> bool:
    """Whether a new reservation or sequence would have to wait there for others to finish."""
    return decode.waiting > 0 or decode.sequences >= decode.max_num_seqs


def _holds_its_share(start: InstanceLoad) -> bool:
    """Whether finished KV waiting for its receivers blocks new prompts."""
    return start.held_tokens >= hold_limit(start.pool_tokens)
