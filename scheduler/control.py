"""The scheduler's control plane: registry, dispatch, readiness and probe."""

import asyncio
import dataclasses

from scheduler.dispatch import Dispatch
from scheduler.limits import ControlLimits
from scheduler.membership.member import Member
from scheduler.model.kind import ModelKind
from scheduler.probe import PathProbe
from scheduler.readiness import Readiness
from scheduler.registry import Registry
from scheduler.role_policy import RolePolicy
from scheduler.view import ClusterView, GapView, InstanceView, RetryView
from wire.errors import PdserveError


class Control:
    """Owner of the parts and their tasks. `run` runs as long as the scheduler; `dispatch` accepts the requests.

    `id_prefix` starts every prompt's id and is unique per scheduler. `kind` selects the requests that probes send.
    """

    def __init__(
        self, registry: Registry, limits: ControlLimits, *, id_prefix: str, kind: ModelKind = ModelKind.TEXT
    ) -> None:
        self.registry = registry
        self.readiness = Readiness(self.registry, limits, kind)
        self.dispatch = Dispatch(self.registry, self.readiness, limits, id_prefix=id_prefix)
        self.roles = RolePolicy(self.registry, self.dispatch.placer, self.dispatch.admission)
        self._limits = limits
        self._probe = PathProbe(self.dispatch, self.readiness, limits, kind)

    async def run(self) -> None:
        """Keep the sessions, and probe, until cancelled.

        Raises Incompatible if an incompatible instance is found before anything was served.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.registry.run())
                tasks.create_task(self._probe.run())
                if self._limits.follow_load:
                    tasks.create_task(self.roles.run())
        except BaseExceptionGroup as group:
            errors = [error for error in group.exceptions if isinstance(error, PdserveError)]
            raise errors[0] if errors else group from None

    def ready(self) -> bool:
        """Whether a path accepts new work and was used recently."""
        return self.readiness.ready()

    def view(self) -> ClusterView:
        """Return the current view."""
        admission, retries = self.dispatch.admission, self.dispatch.retries
        return ClusterView(
            ready=self.ready(),
            instances=tuple(map(_instance_view, (*self.registry.members, *self.registry.leaving))),
            ledger=dataclasses.replace(self.dispatch.ledger),
            queued_prompts=admission.num_waiting,
            queued_tokens=admission.waiting_tokens,
            retries=RetryView(retries.num_under_way, retries.num_waiting, retries.limit),
            gaps=self._gap_views(),
            table=self.registry.table,
            roles_gone=self.registry.roles_gone(),
            may_lack=self._limits.may_lack,
        )

    def _gap_views(self) -> tuple[GapView, ...]:
        ids = {instance.index: instance.description.instance_id for instance in self.registry.living()}
        return tuple(GapView(ids[gap.sender], ids[gap.receiver], gap.why) for gap in self.registry.gaps())


def _instance_view(member: Member) -> InstanceView:
    instance, expected = member.instance if member.is_living else None, member.expected
    return InstanceView(
        index=expected.index,
        name=expected.name,
        role=member.role,
        address=expected.address,
        state=member.state.value,
        why=member.why,
        description=member.description,
        load=None if instance is None else instance.load,
        table_digest="" if instance is None else instance.table_digest,
    )
