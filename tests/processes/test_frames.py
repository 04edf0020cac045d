"""Frames arrive whole or not at all, however the bytes are split."""

import io
import socket

import pytest

from processes.frames import frame, read_frame, receive_object, send_object, take_frame


def test_a_frame_is_its_length_followed_by_its_parts() -> None:
    assert frame(b"ab", b"", b"c") == b"\0\0\0\x03abc"


def test_frames_are_taken_when_they_are_complete() -> None:
    received = bytearray()
    taken = list[bytes]()

    for byte in frame(b"one") + frame() + frame(b"two") + b"\0\0":
        received.append(byte)
        while (body := take_frame(received, 3)) is not None:
            taken.append(body)

    assert taken == [b"one", b"", b"two"]
    assert received == b"\0\0"


@pytest.mark.parametrize("data", [b"", b"\0\0", frame(b"cut")[:-1]])
def test_a_stream_that_ends_within_a_frame_yields_none(data: bytes) -> None:
    assert read_frame(io.BytesIO(data).read) is None


@pytest.mark.parametrize("data", [frame(b"four"), b"\xff\xff\xff\xff"])
def test_a_frame_over_the_limit_is_refused_before_its_body(data: bytes) -> None:
    with pytest.raises(ValueError, match="but the limit is 3"):
        read_frame(io.BytesIO(data[:4]).read, 3)
    with pytest.raises(ValueError, match="but the limit is 3"):
        take_frame(bytearray(data[:4]), 3)


def test_only_json_objects_cross_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            send_object(ours, {"a": ["b", 1]})
            ours.sendall(frame(b"[]"))

        assert receive_object(theirs, 100) == {"a": ["b", 1]}
        with pytest.raises(ValueError, match="must be an object"):
            receive_object(theirs, 100)
        assert receive_object(theirs, 100) is None
