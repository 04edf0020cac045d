"""An immutable view of the control plane, for status, metrics and the ready route."""

from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler.finished_requests import FinishedRequests
from wire.description import InstanceDescription
from wire.load import LoadSnapshot
from wire.types import Role


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One entry of the table, or a removed one that is finishing its work.

    `table_digest` is the digest of the table it uses. If it is not living, `why` is the reason, `load` is None and
    `table_digest` is empty.
    """

    index: int
    name: str
    role: Role
    address: str
    state: str
    why: str
    description: InstanceDescription | None
    load: LoadSnapshot | None
    table_digest: str = ""

    @property
    def instance_id(self) -> str:
        """Its own id, or its address until it was first reached."""
        return self.address if self.description is None else self.description.instance_id

    @property
    def is_worker(self) -> bool:
        """Whether it is known to be a worker of another engine."""
        return self.description is not None and self.description.worker is not None

    @property
    def kv_digests(self) -> str:
        """Whether it requires digests of KV frames, `on` or `off`; empty for a worker, or before it was reached."""
        if self.description is None or self.is_worker:
            return ""
        return "on" if self.description.kv_digests else "off"

    @property
    def engine(self) -> str:
        """The program that serves it, such as `vLLM 0.32.0`; empty until it was first reached."""
        return "" if self.description is None else self.description.engine


@dataclass(frozen=True, slots=True)
class RetryView:
    """The running and waiting retries, and their current limit."""

    under_way: int = 0
    waiting: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class GapView:
    """Two living instances, by id, without a common KV transport, and why."""

    sender: str
    receiver: str
    why: str


@dataclass(frozen=True, slots=True)
class TableView:
    """The global table in use: its digest, and how many tables were used so far, including this one."""

    version: int = 1
    digest: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The state of the control plane at one moment."""

    ready: bool
    instances: tuple[InstanceView, ...]
    ledger: FinishedRequests
    queued_prompts: int
    queued_tokens: int
    retries: RetryView = field(default_factory=RetryView)
    gaps: tuple[GapView, ...] = ()
    table: TableView = field(default_factory=TableView)
    roles_gone: Collection[Role] = ()
    may_lack: Collection[Role] = ()

    @property
    def when_gone(self) -> dict[str, str]:
        """What happens to requests while a role is gone, for each role that is: `fail` or `local`."""
        return {role.value: choice for (role, choice), gone in self.role_gone.items() if gone}

    @property
    def role_gone(self) -> dict[tuple[Role, str], int]:
        """Whether no instance of a role is living, by the role and what happens to requests meanwhile."""
        choices = {role: "local" if role in self.may_lack else "fail" for role in (Role.PREFILL, Role.DECODE)}
        return {(role, choice): int(role in self.roles_gone) for role, choice in choices.items()}

    @property
    def table_versions(self) -> dict[str, int]:
        """The version of the current table by its digest."""
        return {self.table.digest: self.table.version}

    @property
    def table_agrees(self) -> dict[str, int]:
        """Whether each living instance uses the current table, by its id; workers of other engines use none."""
        digest = self.table.digest
        living = [one for one in self.instances if one.load is not None and not one.is_worker]
        return {one.instance_id: int(one.table_digest == digest) for one in living}

    @property
    def instance_info(self) -> dict[tuple[str, ...], int]:
        """The value 1 for each instance by id, name, role, address, state, whether it requires digests, and engine."""
        return {
            (one.instance_id, one.name, one.role.value, one.address, one.state, one.kv_digests, one.engine): 1
            for one in self.instances
        }
