"""Both halves of the link handshake: no transport is opened before the instances have verified that they match.

sender    greet:  HELLO ->              PROOF ->                     outlet set-up
receiver  answer:       <- CHALLENGE | REFUSE  <- WELCOME | REFUSE    inlet set-up   <- READY | REFUSE
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from kvtransfer.hello import Hello, Welcome, decode_hello, decode_welcome, encode_hello, encode_welcome
from kvtransfer.link_codec import PREFIX, VersionMismatch, WireError, decode, encode, pack
from kvtransfer.link_messages import MessageType, Refuse
from kvtransfer.proof import (
    check_challenge,
    check_peer,
    check_proof,
    decode_challenge,
    decode_proof,
    encode_challenge,
    encode_proof,
    make_challenge,
    make_proof,
    no_proof,
)
from kvtransfer.stream import LinkLost, Stream, expect
from kvtransfer.transport_interface import Inlet, Outlet, Timeouts, Transport
from security.trust import Trust
from telemetry.capped_logs import CappedLog
from wire.errors import Incompatible, PdserveError, from_name, to_name


def greet(
    stream: Stream, transport: Transport, hello: Hello, timeouts: Timeouts, trust: Trust
) -> tuple[Outlet, Welcome]:
    """The sender's half. Raises LinkLost, WireError, OSError and the receiver's refusal."""
    check_peer(stream, trust)
    hello = replace(hello, transport=transport.traits.name)
    encoded = encode_hello(hello)
    stream.send([encoded])
    _answer_challenge(stream, hello, encoded[PREFIX.size :], timeouts, trust)
    welcome = decode_welcome(_receive_answer(stream, MessageType.WELCOME, hello, timeouts))
    if (welcome.receiver_epoch, welcome.link_epoch) != (hello.receiver_epoch, hello.link_epoch):
        raise WireError("WELCOME has a different epoch")
    outlet = transport.outlet(stream, hello, timeouts)
    try:
        _receive_answer(stream, MessageType.READY, hello, timeouts)
    except BaseException:
        outlet.close()
        raise
    return outlet, welcome


def answer(
    stream: Stream, timeouts: Timeouts, choose: Callable[[Hello], Transport], trust: Trust, *, digests: bool,
    refusals: CappedLog,
) -> tuple[Inlet, Hello]:  # fmt: skip
    """The receiver's half; `choose` raises a PdserveError to refuse a sender.

    `digests` of the returned HELLO is the setting of this link. Raises LinkLost, WireError, PdserveError.
    """
    try:
        body = expect(stream, MessageType.HELLO, timeout_s=timeouts.progress_s)
        hello = decode_hello(body)
        check_peer(stream, trust)
        _check_proof(stream, hello, bytes(body), timeouts, trust)
        transport = choose(hello)
        hello = replace(hello, digests=hello.digests or digests)
        stream.send([encode_welcome(Welcome(hello.receiver_epoch, hello.link_epoch, hello.digests))])
        inlet = transport.inlet(stream, hello, timeouts)
    except VersionMismatch as error:
        _refuse(stream, Incompatible(str(error)), refusals)
        raise
    except PdserveError as error:
        _refuse(stream, error, refusals)
        raise
    try:
        stream.send([pack(MessageType.READY, b"")])
    except BaseException:
        inlet.close()
        raise
    return inlet, hello


def _answer_challenge(stream: Stream, hello: Hello, body: bytes, timeouts: Timeouts, trust: Trust) -> None:
    challenge = decode_challenge(_receive_answer(stream, MessageType.CHALLENGE, hello, timeouts))
    try:
        check_challenge(trust, hello, body, challenge)
    except Incompatible:
        stream.send([encode_proof(no_proof(trust))])  # so that the receiver, too, can report the mismatch
        raise
    stream.send([encode_proof(make_proof(trust, hello, body, challenge))])


def _check_proof(stream: Stream, hello: Hello, body: bytes, timeouts: Timeouts, trust: Trust) -> None:
    challenge = make_challenge(trust, hello, body)
    stream.send([encode_challenge(challenge)])
    proof = decode_proof(expect(stream, MessageType.PROOF, timeout_s=timeouts.progress_s))
    check_proof(trust, hello, body, challenge, proof)


def _receive_answer(stream: Stream, wanted: MessageType, hello: Hello, timeouts: Timeouts) -> bytearray:
    answers = (wanted, MessageType.REFUSE)
    kind, body = stream.receive_message(first_byte_s=timeouts.progress_s, wanted=answers, whole_s=timeouts.progress_s)
    if kind is MessageType.REFUSE:
        refusal = decode(kind, body)
        assert isinstance(refusal, Refuse)
        raise from_name(refusal.error, f"{hello.receiver_id} refused the link: {refusal.reason}")
    return body


def _refuse(stream: Stream, error: PdserveError, refusals: CappedLog) -> None:
    log_refusal(refusals, error)
    with contextlib.suppress(LinkLost):  # the peer may have refused us first; our own reason is the one to report
        stream.send([encode(Refuse(to_name(error), str(error)))])


def log_refusal(refusals: CappedLog, error: PdserveError) -> None:
    """Log why a link was refused, at a capped rate: unproven peers can cause any number of refusals."""
    refusals.warning("kv_link_refused", f"kv_link_refused/{to_name(error)}", error=to_name(error), message=error)
