"""The cluster secret on KV links, over real sockets: no transport opens before both ends have proven it."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.dial import dial
from kvtransfer.hello import Hello, encode_hello
from kvtransfer.link_codec import MAGIC, PREFIX, WireError, decode, decode_prefix, encode, pack
from kvtransfer.link_messages import Frame, MessageType, Open, Refuse
from kvtransfer.proof import (
    Challenge,
    Proof,
    decode_challenge,
    decode_proof,
    encode_challenge,
    encode_proof,
    make_challenge,
    make_proof,
    no_proof,
)
from kvtransfer.receiver import KvReceiver
from kvtransfer.stream import LinkLost, Stream, expect
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import NAMES, make_transports
from security.secret import Secret
from security.trust import Trust
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool, Recorder, until
from wire.errors import Incompatible, InstanceLost, PdserveError
from wire.kv_layout import PoolLayout
from wire.types import PROTOCOL_VERSION, KvEndpoint

SECRET, OTHER = Secret(b"the-cluster-secret-of-the-tests-"), Secret(b"another-" * 8)
SENDER, RECEIVER = Trust(SECRET, host="sender-host"), Trust(SECRET, host="receiver-host")
STRANGERS = Trust(None, frozenset({"192.0.2.1"}), loopback=False, host="receiver-host")
TRANSPORTS = [name for name in NAMES if name in ("shm", "tcp")]
LAYOUT = PoolLayout(TENSORS, num_blocks=8, block_size=4)
nonces, proofs = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)
texts = st.text(max_size=40)


def hello(transport: str = "", nonce: bytes = bytes(16)) -> Hello:
    return Hello(PROTOCOL_VERSION, "prefill-0", 5, 1, "decode-0", 77, transport, 4, 8, TENSORS, nonce)


class Pair:
    """A receiver on real sockets and what a sender does to it."""

    def __init__(self, transport: str, trust: Trust, progress_timeout_s: float) -> None:
        self.transports, self.pools = transport.split(","), (Pool(LAYOUT), Pool(LAYOUT))
        self.receiver = KvReceiver(
            self.pools[1], instance_id="decode-0", epoch=77, host="127.0.0.1", transports=self.transports,
            events=Recorder(), progress_timeout_s=progress_timeout_s, trust=trust,
        )  # fmt: skip

    def dial(self, trust: Trust) -> str:
        """Dial once and hang up; return the transport."""
        offered = make_transports(self.transports, self.pools[0])
        dialled = dial(offered, self.receiver.endpoints, hello(), Timeouts(5, DEADLINE_S), trust)
        dialled.outlet.close()
        dialled.stream.close()
        return dialled.transport

    def connect(self) -> Stream:
        """Return a raw connection to the listener of its links."""
        endpoint = self.receiver.endpoints[0]
        return make_transports(self.transports, self.pools[0])[0].connect(endpoint, Timeouts(5, DEADLINE_S))

    def until_refused(self, count: int = 1) -> None:
        until(lambda: self.receiver.counts.refused_connections == count)


@contextmanager
def pair(transport: str, trust: Trust, progress_timeout_s: float = DEADLINE_S) -> Iterator[Pair]:
    made = Pair(transport, trust, progress_timeout_s)
    try:
        yield made
    finally:
        made.receiver.close()
        for pool in made.pools:
            pool.close()


@pytest.fixture
def inlets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The transports of which anything was opened, on either side."""
    opened: list[str] = []
    for transport in make_transports(tuple(TRANSPORTS), Pool(LAYOUT)):
        for half in ("inlet", "outlet"):

            def spy(self: object, *given: object, _real: object = getattr(type(transport), half)) -> object:
                opened.append(type(self).__name__)
                return _real(self, *given)  # type: ignore[operator]

            monkeypatch.setattr(type(transport), half, spy)
    return opened


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("trusts", [(SENDER, RECEIVER), (Trust(), Trust())], ids=["secret", "addresses"])
def test_ends_that_trust_each_other_connect(transport: str, trusts: tuple[Trust, Trust], inlets: list[str]) -> None:
    with pair(transport, trusts[1]) as one:
        assert one.dial(trusts[0]) == transport
        assert len(inlets) == 2
        assert one.receiver.counts.refused_connections == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("sender", "receiver", "here", "there"),
    [
        (
            Trust(OTHER, host="sender-host"), RECEIVER,
            f"differ: {OTHER.fingerprint} here (sender-host), {SECRET.fingerprint} there (decode-0, receiver-host)",
            f"differ: {SECRET.fingerprint} here (receiver-host), {OTHER.fingerprint} there (prefill-0, sender-host)",
        ),
        (
            Trust(host="sender-host"), RECEIVER,
            f"no cluster secret here (sender-host), but {SECRET.fingerprint} there (decode-0, receiver-host)",
            f"{SECRET.fingerprint} is set here (receiver-host), but none is set there (prefill-0, sender-host)",
        ),
        (
            SENDER, Trust(host="receiver-host"),
            f"{SECRET.fingerprint} is set here (sender-host), but none is set there (decode-0, receiver-host)",
            f"no cluster secret here (receiver-host), but {SECRET.fingerprint} there (prefill-0, sender-host)",
        ),
    ],
    ids=["unequal", "sender lacks it", "receiver lacks it"],
)  # fmt: skip
def test_different_secrets_are_reported_on_both_sides(
    transport: str, sender: Trust, receiver: Trust, here: str, there: str, inlets: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with pair(transport, receiver) as one:
        with pytest.raises(Incompatible) as caught:
            one.dial(sender)
        one.until_refused()

        assert here in str(caught.value)
        assert there in caplog.text
        assert not inlets


def test_without_a_secret_an_unknown_address_is_refused(inlets: list[str]) -> None:
    with pair("tcp", STRANGERS) as one:
        with pytest.raises(Incompatible, match=r"127\.0\.0\.1 is not in the global table of receiver-host \(192\.0"):
            one.dial(Trust())
        one.until_refused()

        assert not inlets


def test_without_a_secret_a_sender_offers_nothing_to_an_unknown_peer(inlets: list[str]) -> None:
    with pair("tcp", Trust()) as one:
        with pytest.raises(Incompatible, match=r"127\.0\.0\.1 is not in the global table of receiver-host"):
            one.dial(STRANGERS)

        assert not inlets


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_another_users_unix_socket_is_refused(side: str, inlets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("shm", Trust()) as one:
        calls: list[object] = []

        def same_user(sock: socket.socket) -> bool:
            calls.append(sock)
            is_client = sock.getsockname() == ""  # it has no name, an accepted one its listener's
            return bool(is_client == (side == "receiver"))

        monkeypatch.setattr("kvtransfer.shm.is_same_user", same_user)
        with pytest.raises((Incompatible, InstanceLost)):
            one.dial(Trust())

        assert calls
        assert not inlets


def test_a_sender_of_another_user_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.shm.is_same_user", lambda sock: False)
    with pair("shm,tcp", RECEIVER) as one:
        assert one.dial(SENDER) == "tcp"


def _read(stream: Stream, wanted: MessageType) -> bytearray:
    return expect(stream, wanted, timeout_s=DEADLINE_S)


def _challenge(stream: Stream, transport: str, sent_hello: Hello | None = None) -> tuple[Hello, bytes, Challenge]:
    first = sent_hello or hello(transport)
    encoded = encode_hello(first)
    stream.send([encoded])
    return first, encoded[PREFIX.size :], decode_challenge(_read(stream, MessageType.CHALLENGE))


def _refusal(stream: Stream) -> Refuse:
    refusal = decode(MessageType.REFUSE, _read(stream, MessageType.REFUSE))
    assert isinstance(refusal, Refuse)
    return refusal


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_proof_for_another_connection_or_none_is_refused(transport: str, inlets: list[str]) -> None:
    with pair(transport, RECEIVER) as one:
        first = one.connect()
        sent_hello, body, challenge = _challenge(first, transport)
        good = make_proof(SENDER, sent_hello, body, challenge)
        first.send([encode_proof(good)])
        _read(first, MessageType.WELCOME)
        until(lambda: len(inlets) == 1)

        again = one.connect()
        _challenge(again, transport)
        again.send([encode_proof(good)])  # the same HELLO, another nonce of the receiver's
        assert "cannot prove that it holds it" in _refusal(again).reason

        reflected = one.connect()
        _, _, theirs = _challenge(reflected, transport)
        reflected.send([encode_proof(Proof(theirs.proof, SECRET.fingerprint, "evil"))])
        assert "cannot prove that it holds it" in _refusal(reflected).reason

        silent = one.connect()
        _challenge(silent, transport)
        silent.send([encode_proof(no_proof(SENDER))])
        assert "cannot prove that it holds it" in _refusal(silent).reason
        one.until_refused(3)

        assert len(inlets) == 1
        for stream in (first, again, reflected, silent):
            stream.close()


def test_a_proof_is_bound_to_every_byte_of_hello() -> None:
    with pair("tcp", RECEIVER) as one:
        stream = one.connect()
        sent_hello = hello("tcp")
        _, _, challenge = _challenge(stream, "tcp", sent_hello)
        changed = encode_hello(hello("tcp", nonce=b"another nonce---"))[PREFIX.size :]
        stream.send([encode_proof(make_proof(SENDER, sent_hello, changed, challenge))])

        assert "cannot prove that it holds it" in _refusal(stream).reason
        stream.close()


@pytest.mark.parametrize("trust", [RECEIVER, Trust()], ids=["secret", "addresses"])
@pytest.mark.parametrize("kind", [MessageType.OPEN, MessageType.FRAME, MessageType.COMMIT, MessageType.RENEW])
def test_no_message_is_read_before_the_proof(trust: Trust, kind: MessageType, inlets: list[str]) -> None:
    with pair("tcp", trust) as one:
        stream = one.connect()
        _challenge(stream, "tcp")
        stream.send([encode(Open("ab" * 16, 77, 20, 0)) if kind is MessageType.OPEN else pack(kind, b"")])
        with pytest.raises(LinkLost):
            stream.receive_message(first_byte_s=DEADLINE_S)
        one.until_refused()

        assert not inlets
        stream.close()


def test_a_receiver_that_only_names_the_fingerprint_gets_no_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = KvEndpoint("tcp", f"127.0.0.1:{listener.getsockname()[1]}")
        pool = Pool(LAYOUT)
        received: list[Proof] = []

        def impostor() -> None:
            sock, _ = listener.accept()
            stream = Stream(sock, progress_timeout_s=DEADLINE_S)
            _read(stream, MessageType.HELLO)
            stream.send([encode_challenge(Challenge(bytes(16), bytes(32), SECRET.fingerprint, "evil"))])
            received.append(decode_proof(_read(stream, MessageType.PROOF)))
            stream.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(
            Incompatible, match=r"evil claims to hold this cluster's secret .* but cannot prove that it holds it"
        ):
            dial(make_transports(("tcp",), pool), (endpoint,), hello(), Timeouts(5, DEADLINE_S), SENDER)
        thread.join(DEADLINE_S)

        assert received[0].proof == bytes(32)
        pool.close()


def test_the_secret_is_never_in_a_message() -> None:
    sent_hello = hello("tcp")
    body = encode_hello(sent_hello)[PREFIX.size :]
    challenge = make_challenge(RECEIVER, sent_hello, body)
    sent = body + encode_challenge(challenge) + encode_proof(make_proof(SENDER, sent_hello, body, challenge))

    assert SECRET.value not in sent
    assert SECRET.fingerprint.encode() in sent


@given(st.builds(Challenge, nonces, proofs, texts, texts), st.builds(Proof, proofs, texts, texts))
def test_both_messages_round_trip(challenge: Challenge, proof: Proof) -> None:
    for message, encoded, back in (
        (challenge, encode_challenge(challenge), decode_challenge),
        (proof, encode_proof(proof), decode_proof),
    ):
        kind, length = decode_prefix(encoded[: PREFIX.size])
        assert kind in (MessageType.CHALLENGE, MessageType.PROOF)
        assert length == len(encoded) - PREFIX.size
        assert back(encoded[PREFIX.size :]) == message


@st.composite
def damaged_bodies(draw: st.DrawFn) -> bytes:
    """Draw random bytes, or a good body of either message with a few bytes of it written over, cut off or added."""
    challenges = st.builds(Challenge, nonces, proofs, texts, texts).map(encode_challenge)
    good = draw(st.one_of(challenges, st.builds(Proof, proofs, texts, texts).map(encode_proof)))[PREFIX.size :]
    at, patch = draw(st.integers(0, len(good))), draw(st.binary(max_size=4))
    kept = draw(st.sampled_from([good[at + len(patch) :], b"", good[at:]]))
    return draw(st.sampled_from([good[:at] + patch + kept, draw(st.binary(max_size=200))]))


@given(damaged_bodies())
def test_damaged_bodies_are_rebuilt_to_the_byte_or_refused(body: bytes) -> None:
    with suppress(WireError):
        assert encode_challenge(decode_challenge(body))[PREFIX.size :] == body
    with suppress(WireError):
        assert encode_proof(decode_proof(body))[PREFIX.size :] == body


@pytest.mark.parametrize("kind", [MessageType.CHALLENGE, MessageType.PROOF])
def test_a_length_over_the_limit_is_refused_without_allocating(kind: MessageType) -> None:
    with pytest.raises(WireError, match=f"{kind.name} has {2**32 - 1} bytes, but the limit is 1024"):
        decode_prefix(PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 2**32 - 1))


def test_sizes_of_2_to_the_63_and_more_are_refused() -> None:
    frame = Frame("ab" * 16, 77, 0, 0, 0, 0, 4, 0, 2, 2**63, 0, (0,))
    with pytest.raises(struct.error):
        encode(Frame("ab" * 16, 77, 0, 0, 0, 0, 4, 0, 2, -1, 0, (0,)))

    assert decode(MessageType.FRAME, encode(frame)[PREFIX.size :]) == frame  # refused later: test_connection_limit.py


def test_a_foreign_error_keeps_the_listener_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("tcp", RECEIVER) as one:
        with monkeypatch.context() as patch:
            patch.setattr("kvtransfer.handshake.check_proof", lambda *given: 1 / 0)
            with pytest.raises(PdserveError):
                one.dial(SENDER)
            one.until_refused()

        assert one.dial(SENDER) == "tcp"


@pytest.mark.parametrize("kind", [MessageType.COMMIT, MessageType.FRAME, MessageType.REFUSE])
def test_an_unknown_peers_unexpected_message_allocates_nothing(
    kind: MessageType,
) -> None:
    with pair("tcp", RECEIVER, progress_timeout_s=10 * DEADLINE_S) as one:
        stream = one.connect()
        stream.send([PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 8_000)])  # and no byte of its body
        with pytest.raises(LinkLost, match=r"closed|broke"):
            stream.receive_message(first_byte_s=DEADLINE_S)

        one.until_refused()
        stream.close()


def test_a_hello_sent_byte_by_byte_has_one_deadline() -> None:
    with pair("tcp", RECEIVER, progress_timeout_s=0.5) as one:
        sock = one.connect().socket
        sock.settimeout(0.05)
        sent, cut = iter(encode_hello(hello("tcp"))), False
        while not cut:
            try:
                sock.send(bytes([next(sent)]))
                cut = sock.recv(1) == b""  # paces the drip: far more often than the 0.5 s without progress
            except TimeoutError:
                continue
            except ConnectionError:
                cut = True

        one.until_refused()
        assert len(list(sent)) > 100
        sock.close()
