"""Try transports in the order given until one of them carries a link."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvtransfer.handshake import greet
from kvtransfer.hello import NONCE_BYTES, Hello
from kvtransfer.link_codec import VersionMismatch, WireError
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Outlet, Timeouts, Transport
from security.trust import Trust
from telemetry.logs import EventLogger
from wire.errors import Incompatible, InstanceLost, PdserveError
from wire.link_reasons import NOT_OFFERED
from wire.types import KvEndpoint

_log = EventLogger("kvtransfer")


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection that is ready for frames."""

    stream: Stream
    outlet: Outlet
    transport: str
    digests: bool


class DialWatch(Protocol):
    """The callbacks of a dial, implemented by its link."""

    def check_open(self) -> None:
        """Raise InstanceLost if the link was closed in the meantime: the dial stops."""
        ...

    def connected(self, stream: Stream) -> None:
        """Register a connection that `Stream.shutdown` may cut from now on."""
        ...

    def failed(self, transport: str, reason: str) -> None:
        """Record that this transport was tried and failed; others are tried next."""
        ...


class _Unwatched:
    """A DialWatch without a link."""

    def check_open(self) -> None:
        """Do nothing: it is never closed."""

    def connected(self, stream: Stream) -> None:
        """Do nothing."""

    def failed(self, transport: str, reason: str) -> None:
        """Do nothing."""


def endpoint_for(transport: Transport, endpoints: Sequence[KvEndpoint], rank: int) -> KvEndpoint | None:
    """Return the endpoint at which `rank` of the receiver offers this transport, or None."""
    offered = (one for one in endpoints if (one.transport, one.rank) == (transport.traits.name, rank))
    return next(offered, None)


def out_of_reach(transport: Transport, endpoints: Sequence[KvEndpoint], rank: int) -> str | None:
    """Return why this transport cannot work at all, or None if it may."""
    endpoint = endpoint_for(transport, endpoints, rank)
    return NOT_OFFERED if endpoint is None else transport.unreachable(endpoint)


def dial(
    transports: Sequence[Transport], endpoints: Sequence[KvEndpoint], hello: Hello, timeouts: Timeouts,
    trust: Trust | None = None, watch: DialWatch | None = None,
) -> Dialled:  # fmt: skip
    """Return a link over the first transport that works.

    Raises Incompatible if the instances have no common configuration, InstanceLost if no transport works.
    """
    watch, rank, skipped = watch or _Unwatched(), hello.receiver_rank, []
    if all(endpoint_for(transport, endpoints, rank) is None for transport in transports):
        own_names, peer_names = (
            [one.traits.name for one in transports],
            [one.transport for one in endpoints if one.rank == rank],
        )
        raise Incompatible(f"no common KV transport with {hello.receiver_id}: {own_names} here, {peer_names} there")
    for transport in transports:
        name = transport.traits.name
        endpoint, lacking = endpoint_for(transport, endpoints, rank), out_of_reach(transport, endpoints, rank)
        if endpoint is None or lacking is not None:
            skipped.append(f"{name}: {lacking}")
            continue
        watch.check_open()
        try:
            stream, outlet, digests = _link(transport, endpoint, hello, timeouts, trust or Trust(), watch)
            return Dialled(stream, outlet, name, digests)
        except Incompatible:
            raise
        except VersionMismatch as error:
            raise Incompatible(f"{hello.receiver_id}: {error}") from error
        except (OSError, ValueError, LinkLost, WireError, PdserveError) as error:
            watch.check_open()
            skipped.append(f"{name} at {endpoint.address}: {error}")
            watch.failed(name, f"at {endpoint.address}: {error}")
            _log.warning("kv_dial_failed", peer=hello.receiver_id, transport=name, error=error)
    raise InstanceLost(f"no KV link to {hello.receiver_id}: {'; '.join(skipped)}")


def _link(
    transport: Transport, endpoint: KvEndpoint, hello: Hello, timeouts: Timeouts, trust: Trust, watch: DialWatch
) -> tuple[Stream, Outlet, bool]:
    stream = transport.connect(endpoint, timeouts)
    try:
        watch.connected(stream)
        watch.check_open()
        hello = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
        outlet, welcome = greet(stream, transport, hello, timeouts, trust)
    except BaseException:
        stream.close()
        raise
    return stream, outlet, welcome.digests
