"""A frozen picture of the control half, for status, metrics and the ready route."""

from dataclasses import dataclass, field

from wire.types import InstanceDescription, LoadSnapshot, Role


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One entry of the table, or one that left it and still has work.

    `why` says what is wrong where it does not live; `load` is None and `table_digest`, of the table it goes by, empty.
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
        """Its own name, or its address while it was never reached."""
        return self.address if self.description is None else self.description.instance_id

    @property
    def kv_digests(self) -> str:
        """Whether it wants KV frames checked, `on` or `off`; empty while it was never reached."""
        return "" if self.description is None else "on" if self.description.kv_digests else "off"


@dataclass(frozen=True, slots=True)
class LedgerView:
    """Requests since the start; received = completed + failed + cancelled + inflight."""

    received: int
    completed: int
    failed: int
    cancelled: int
    inflight: int
    rejected: int
    retried_prompts: int
    delayed_retries: int = 0


@dataclass(frozen=True, slots=True)
class RetryView:
    """The retries that count against the budget, those that wait for it, and its limit now."""

    under_way: int = 0
    waiting: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class GapView:
    """Two living instances, by id, that no KV transport joins, and why."""

    sender: str
    receiver: str
    why: str


@dataclass(frozen=True, slots=True)
class TableView:
    """The global table in use: its digest, and how many tables were in use up to it, itself included."""

    version: int = 1
    digest: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything at one moment."""

    ready: bool
    instances: tuple[InstanceView, ...]
    ledger: LedgerView
    queued_prompts: int
    queued_tokens: int
    retries: RetryView = field(default_factory=RetryView)
    gaps: tuple[GapView, ...] = ()
    table: TableView = field(default_factory=TableView)
