"""Every message survives the wire, and the decoder refuses all other bytes."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.hello import Hello, Welcome, decode_hello, decode_welcome, encode_hello, encode_welcome
from kvtransfer.link_codec import (
    MAGIC,
    MAX_DESCRIPTION_BYTES,
    MAX_TEXT_BYTES,
    PREFIX,
    VersionMismatch,
    WireError,
    decode,
    decode_prefix,
    encode,
)
from kvtransfer.link_messages import (
    SIGNALS,
    Abort,
    Ack,
    Commit,
    Frame,
    Held,
    MessageType,
    Nack,
    Open,
    Read,
    Refuse,
    Renew,
    Signal,
    Taken,
    TicketMessage,
)
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION

u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
texts = st.text(max_size=200)
messages: st.SearchStrategy[TicketMessage | Refuse | Signal] = st.one_of(
    st.builds(Open, ids, u64, u32, u32),
    st.builds(Frame, ids, u64, u32, u32, u32, u32, u32, u16, u16, u64, u64, st.lists(u32, max_size=9).map(tuple)),
    st.builds(Nack, ids, u64, u32),
    st.builds(Taken, ids, u64, u32),
    st.builds(Commit, ids, u64, u32, u64, u64, u64, st.binary(max_size=99)),
    st.builds(Ack, ids, u64),
    st.builds(Abort, ids, u64, texts, texts),
    st.builds(Renew, ids, u64),
    st.builds(Read, ids, u64),
    st.builds(Held, ids, u64),
    st.builds(Refuse, texts, texts),
    st.builds(Signal, st.sampled_from(SIGNALS), u64),
)


@given(messages)
def test_every_message_round_trips(message: TicketMessage | Refuse | Signal) -> None:
    data = encode(message)
    kind, length = decode_prefix(data[: PREFIX.size])

    assert length == len(data) - PREFIX.size
    assert decode(kind, data[PREFIX.size :]) == message


@given(st.sampled_from(sorted(set(MessageType) - {MessageType.HELLO, MessageType.WELCOME})), st.binary(max_size=300))
def test_random_bodies_are_decoded_or_refused(kind: MessageType, body: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(kind, body)


@given(st.binary(max_size=300))
def test_random_hellos_are_decoded_or_refused(body: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_hello(body)
    with contextlib.suppress(WireError):
        decode_welcome(body)


@given(st.binary(min_size=PREFIX.size, max_size=PREFIX.size))
def test_random_prefixes_are_refused(prefix: bytes) -> None:
    with pytest.raises(WireError):
        decode_prefix(prefix)


def test_hello_and_welcome_round_trip() -> None:
    tensors = (KvTensor(0, "k", 3, 64, "bfloat16"), KvTensor(0, "ключ", 1, 576, "float32"))
    hello = Hello(PROTOCOL_VERSION, "prefill-0", 2**63, 4, "decode-1", 2**64 - 1, "shm", 16, 4096, tensors)

    assert decode_hello(encode_hello(hello)[PREFIX.size :]) == hello
    assert decode_welcome(encode_welcome(Welcome(1, 2))[PREFIX.size :]) == Welcome(1, 2)


def test_another_version_is_reported_with_both_values() -> None:
    with pytest.raises(VersionMismatch, match=f"version {PROTOCOL_VERSION} here, 9 there"):
        decode_prefix(PREFIX.pack(MAGIC, 9, MessageType.ACK, 0, 24))


@pytest.mark.parametrize("kind", list(MessageType))
def test_a_length_over_the_limit_of_its_type_is_refused(kind: MessageType) -> None:
    with pytest.raises(WireError, match="the limit is"):
        decode_prefix(PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, MAX_DESCRIPTION_BYTES + 1024))


def test_a_block_count_that_does_not_fit_the_body_is_refused() -> None:
    data = bytearray(encode(Frame("00" * 16, 1, 0, 0, 0, 0, 1, 0, 1, 4, 5, (1, 2))))
    struct.pack_into("!I", data, len(data) - 12, 2**31)

    with pytest.raises(WireError, match="names 2147483648 blocks"):
        decode(MessageType.FRAME, data[PREFIX.size :])


def test_a_long_reason_is_truncated_at_the_limit() -> None:
    data = encode(Abort("00" * 16, 1, "HandoffFailed", "é" * 9_000))

    message = decode(MessageType.ABORT, data[PREFIX.size :])
    assert isinstance(message, Abort)
    assert message.reason == "é" * (MAX_TEXT_BYTES // 2)
