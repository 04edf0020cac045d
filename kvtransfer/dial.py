"""Try the common transports, best first, until one of them carries a link."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtransfer.frame import VersionMismatch, WireError
from kvtransfer.handshake import greet
from kvtransfer.hello import NONCE_BYTES, Hello
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport import Outlet, Timeouts, Transport
from telemetry.logs import EventLogger
from wire.errors import Incompatible, InstanceLost, PdserveError
from wire.trust import Trust
from wire.types import KvEndpoint

_log = EventLogger("kvtransfer")


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection that is ready for frames. `passed_over` says why no better transport is in use."""

    stream: Stream
    outlet: Outlet
    transport: str
    digests: bool
    passed_over: tuple[str, ...] = ()


def dial(
    transports: Sequence[Transport], endpoints: Sequence[KvEndpoint], hello: Hello, timeouts: Timeouts,
    trust: Trust | None = None,
) -> Dialled:  # fmt: skip
    """Return a link over the best transport that works.

    Raises Incompatible when the instances do not belong together, InstanceLost when nothing works.
    """
    offered = {endpoint.transport: endpoint for endpoint in endpoints if endpoint.rank == hello.receiver_rank}
    if not any(transport.name in offered for transport in transports):
        mine = [transport.name for transport in transports]
        raise Incompatible(f"no common KV transport with {hello.receiver_id}: {mine} here, {[*offered]} there")
    passed_over = []
    for transport in transports:
        endpoint = offered.get(transport.name)
        if endpoint is None:
            passed_over.append(f"{transport.name}: not offered there")
            continue
        lacking = transport.unreachable(endpoint)
        if lacking is not None:
            passed_over.append(f"{transport.name}: {lacking}")
            continue
        try:
            stream, outlet, digests = _link(transport, endpoint, hello, timeouts, trust or Trust())
            return Dialled(stream, outlet, transport.name, digests, tuple(passed_over))
        except Incompatible:
            raise
        except VersionMismatch as error:
            raise Incompatible(f"{hello.receiver_id}: {error}") from error
        except (OSError, ValueError, LinkLost, WireError, PdserveError) as error:
            passed_over.append(f"{transport.name} at {endpoint.address}: {error}")
            _log.warning("kv_dial_failed", peer=hello.receiver_id, transport=transport.name, reason=error)
    raise InstanceLost(f"no KV link to {hello.receiver_id}: {'; '.join(passed_over)}")


def _link(
    transport: Transport, endpoint: KvEndpoint, hello: Hello, timeouts: Timeouts, trust: Trust
) -> tuple[Stream, Outlet, bool]:
    stream = transport.connect(endpoint, timeouts)
    try:
        hello = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
        outlet, welcome = greet(stream, transport, hello, timeouts, trust)
    except BaseException:
        stream.close()
        raise
    return stream, outlet, welcome.digests
