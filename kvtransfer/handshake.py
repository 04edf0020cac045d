"""How a link begins, both halves: nothing of a transport is opened before the two instances agreed that they belong.

sender    greet:  HELLO ->                     outlet set-up
receiver  answer:       <- WELCOME | REFUSE     inlet set-up   <- READY | REFUSE
"""

from collections.abc import Callable
from dataclasses import replace

from kvtransfer.frame import MessageType, Refuse, VersionMismatch, WireError, decode, encode, pack
from kvtransfer.hello import Hello, Welcome, decode_hello, decode_welcome, encode_hello, encode_welcome
from kvtransfer.stream import Stream, expect
from kvtransfer.transport import Inlet, Outlet, Timeouts, Transport
from telemetry.logs import EventLogger
from wire.errors import Incompatible, PdserveError, from_name, to_name

_log = EventLogger("kvtransfer")


def greet(stream: Stream, transport: Transport, hello: Hello, timeouts: Timeouts) -> tuple[Outlet, Welcome]:
    """The sender's half. Raises LinkLost, WireError, OSError and what the receiver refused with."""
    hello = replace(hello, transport=transport.name)
    stream.send([encode_hello(hello)])
    welcome = decode_welcome(_expect(stream, MessageType.WELCOME, hello, timeouts))
    if (welcome.receiver_epoch, welcome.link_epoch) != (hello.receiver_epoch, hello.link_epoch):
        raise WireError("WELCOME is of another epoch")
    outlet = transport.outlet(stream, hello, timeouts)
    try:
        _expect(stream, MessageType.READY, hello, timeouts)
    except BaseException:
        outlet.close()
        raise
    return outlet, welcome


def answer(
    stream: Stream, timeouts: Timeouts, choose: Callable[[Hello], Transport], *, digests: bool
) -> tuple[Inlet, Hello]:
    """The receiver's half; `choose` raises a PdserveError for a sender that is not to be served.

    The HELLO returned says of digests what holds on this link. Raises LinkLost, WireError, PdserveError.
    """
    try:
        hello = decode_hello(expect(stream, MessageType.HELLO, timeout_s=timeouts.progress_s))
        transport = choose(hello)
        hello = replace(hello, digests=hello.digests or digests)
        stream.send([encode_welcome(Welcome(hello.receiver_epoch, hello.link_epoch, hello.digests))])
        inlet = transport.inlet(stream, hello, timeouts)
    except VersionMismatch as error:
        _refuse(stream, Incompatible(str(error)))
        raise
    except PdserveError as error:
        _refuse(stream, error)
        raise
    try:
        stream.send([pack(MessageType.READY, b"")])
    except BaseException:
        inlet.close()
        raise
    return inlet, hello


def _expect(stream: Stream, wanted: MessageType, hello: Hello, timeouts: Timeouts) -> bytearray:
    kind, body = stream.receive_message(first_byte_s=timeouts.progress_s)
    if kind is MessageType.REFUSE:
        refusal = decode(kind, body)
        assert isinstance(refusal, Refuse)
        raise from_name(refusal.error, f"{hello.receiver_id} refused the link: {refusal.reason}")
    if kind is not wanted:
        raise WireError(f"{kind.name} came where {wanted.name} was due")
    return body


def _refuse(stream: Stream, error: PdserveError) -> None:
    _log.warning("kv_link_refused", error=to_name(error), reason=error)
    stream.send([encode(Refuse(to_name(error), str(error)))])
