"""Checks when processes connect: is this the instance of that table entry, and are two instances compatible? Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from wire.description import InstanceDescription
from wire.errors import Incompatible
from wire.kv_layout import MAX_RANKS, describe_difference
from wire.types import PROTOCOL_VERSION, Role

SameHost = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class ExpectedInstance:
    """One instance of the global table, in table order, and its address.

    `name` is used in logs and in messages, also to clients: role and number within the role, such as `decode-0`.
    """

    index: int
    name: str
    role: Role
    address: str
    server_ip: str
    device_ids: tuple[str, ...]

    @property
    def is_worker(self) -> bool:
        """Whether another engine serves it: its address is the URL of its HTTP API."""
        return is_url(self.address)

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


def is_url(address: str) -> bool:
    """Return whether an instance's address is the URL of another engine's worker."""
    return "://" in address


def check_version(expected: ExpectedInstance, found: InstanceDescription) -> None:
    """Raise Incompatible unless the instance uses our protocol version."""
    if found.protocol_version != PROTOCOL_VERSION:
        raise Incompatible(
            f"{expected} uses protocol version {found.protocol_version}, but the scheduler uses {PROTOCOL_VERSION}"
        )


def check_identity(
    expected: ExpectedInstance, found: InstanceDescription, *, table_digest: str, same_host: SameHost
) -> None:
    """Raise Incompatible unless the instance at this address is the one in the table and uses the same table."""
    check_place(expected, found, same_host)
    check_table(expected, found, table_digest)


def check_place(expected: ExpectedInstance, found: InstanceDescription, same_host: SameHost) -> None:
    """Raise Incompatible unless the instance at this address is the one in the table."""
    if not same_host(expected.server_ip, found.server_ip) or expected.device_ids != found.device_ids:
        raise Incompatible(
            f"{expected} should be {_place(expected.server_ip, expected.device_ids)}, but {_name(found)}, which "
            f"answers there, is {_place(found.server_ip, found.device_ids)}: is NODE_PORTS not in the table's order?"
        )


def check_table(expected: ExpectedInstance, found: InstanceDescription, table_digest: str) -> None:
    """Raise Incompatible unless the instance uses this table."""
    if found.table_digest != table_digest:
        raise Incompatible(
            f"{expected} ({_name(found)}) read another global table: digest {found.table_digest} there, "
            f"{table_digest} in the scheduler"
        )


def check_pair(one: InstanceDescription, other: InstanceDescription) -> None:
    """Raise Incompatible, naming both instances and both values, unless one can use the other's KV."""
    for what, mine, theirs in (
        ("model weights", _digest(one, "weights"), _digest(other, "weights")),
        ("tokenizer", _digest(one, "tokenizer"), _digest(other, "tokenizer")),
        ("dtype", one.dtype, other.dtype),
    ):
        if mine != theirs:
            raise Incompatible(f"{what} differ: {_name(one)} has {mine}, {_name(other)} has {theirs}")
    difference = describe_difference(one.kv_tensors, other.kv_tensors)
    if difference is not None:
        raise Incompatible(f"{_name(one)} (here) and {_name(other)} (there) differ: {difference}")
    for found in (one, other):
        _check_ranks(found)


def check_workers(one: InstanceDescription, other: InstanceDescription) -> None:
    """Raise Incompatible, naming both URLs and both values, unless both serve the same model in the same version."""
    for what, mine, theirs in (
        ("engines", one.engine, other.engine),
        ("models", one.model.name, other.model.name),
        ("longest sequences", one.max_model_len, other.max_model_len),
    ):
        if mine != theirs:
            raise Incompatible(f"{what} differ: {_url(one)} has {mine}, {_url(other)} has {theirs}")


def _url(found: InstanceDescription) -> str:
    return found.endpoints[0].address


def _check_ranks(found: InstanceDescription) -> None:
    """Raise Incompatible unless each rank of the instance, counted from 0, has an endpoint for KV."""
    ranks = sorted({endpoint.rank for endpoint in found.endpoints})
    if ranks != [*range(len(ranks))] or len(ranks) > MAX_RANKS:
        named = ", ".join(map(str, ranks[:16]))
        raise Incompatible(
            f"{_name(found)} listens for KV on ranks {named}: ranks count from 0 without a gap, {MAX_RANKS} at most"
        )


def _digest(found: InstanceDescription, kind: str) -> str:
    digest = found.model.weights_digest if kind == "weights" else found.model.tokenizer_digest
    return f"{digest} ({found.model.name})"


def _place(server_ip: str, device_ids: tuple[str, ...]) -> str:
    return f"server {server_ip} devices {','.join(device_ids)}"


def _name(found: InstanceDescription) -> str:
    return f"{found.role} {found.instance_id} at {found.host}:{found.port}"
