"""The sender's side of the handshake: try the common transports, best first, and say HELLO."""

from collections.abc import Sequence
from dataclasses import replace

from kvtransfer.frame import MessageType, Refuse, VersionMismatch, WireError, decode
from kvtransfer.hello import Hello, decode_welcome, encode_hello
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport import Outlet
from telemetry.logs import EventLogger
from wire.errors import Incompatible, InstanceLost, PdserveError, from_name
from wire.types import KvEndpoint

_log = EventLogger("kvtransfer")


def dial(
    outlets: Sequence[Outlet], endpoints: Sequence[KvEndpoint], hello: Hello, *,
    connect_timeout_s: float, progress_timeout_s: float,
) -> tuple[Stream, Outlet]:  # fmt: skip
    """Return a welcomed connection over the best transport that works.

    Raises Incompatible when the instances do not belong together, InstanceLost when nothing works.
    """
    common = [(outlet, endpoint) for outlet in outlets for endpoint in endpoints if outlet.reaches(endpoint)]
    if not common:
        mine, theirs = [outlet.name for outlet in outlets], [endpoint.transport for endpoint in endpoints]
        raise Incompatible(f"no common KV transport with {hello.receiver_id}: {mine} here, {theirs} there")
    failures = []
    for outlet, endpoint in common:
        try:
            stream = outlet.connect(endpoint, timeout_s=connect_timeout_s, progress_timeout_s=progress_timeout_s)
            return _greet(stream, outlet, hello, progress_timeout_s), outlet
        except Incompatible:
            raise
        except VersionMismatch as error:
            raise Incompatible(f"{hello.receiver_id}: {error}") from error
        except (OSError, ValueError, LinkLost, WireError, PdserveError) as error:
            failures.append(f"{outlet.name} {endpoint.address}: {error}")
            _log.warning("kv_dial_failed", peer=hello.receiver_id, transport=outlet.name, reason=error)
    raise InstanceLost(f"no KV link to {hello.receiver_id}: {'; '.join(failures)}")


def _greet(stream: Stream, outlet: Outlet, hello: Hello, timeout_s: float) -> Stream:
    try:
        stream.send([encode_hello(replace(hello, transport=outlet.name))])
        kind, body = stream.receive_message(first_byte_s=timeout_s)
        if kind is MessageType.REFUSE:
            refusal = decode(kind, body)
            assert isinstance(refusal, Refuse)
            raise from_name(refusal.error, f"{hello.receiver_id} refused the link: {refusal.reason}")
        if kind is not MessageType.WELCOME:
            raise WireError(f"{kind.name} came where WELCOME was due")
        welcome = decode_welcome(body)
        if (welcome.receiver_epoch, welcome.link_epoch) != (hello.receiver_epoch, hello.link_epoch):
            raise WireError("WELCOME is of another epoch")
    except BaseException:
        stream.close()
        raise
    return stream
