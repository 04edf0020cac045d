"""The messages that both ends of a link exchange to make their group: SETUP messages on the link's stream.

    SETUP | kind u8 | key bytes u16 | key | value |

TERMS describes how the sender makes its group; TURN, GRANTED and BUSY agree on the turn; KEY sets a key of the group's
store; DONE is the last message of either side. Lengths and numbers are bounded.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from kvtransfer.link_codec import WireError, decode, pack
from kvtransfer.link_messages import MessageType, Refuse
from kvtransfer.stream import LinkLost
from native.ticker import run_time
from wire.errors import from_name

_HEAD = struct.Struct("!BH")
_MAX_KEYS = 64
_MAX_KEY_BYTES = 512
_MAX_VALUE_BYTES = 6_144  # HCCL's root info has 4,108 bytes
_MAX_RECEIVED = 1_024


class SetupKind(IntEnum):
    """The kind of a SETUP message."""

    TERMS = 1
    TURN = 2
    GRANTED = 3
    BUSY = 4
    KEY = 5
    DONE = 6


class SetupStream(Protocol):
    """What an exchange needs from the link's stream."""

    def send(self, pieces: Sequence[memoryview | bytes]) -> None: ...

    def receive_message(self, *, first_byte_s: float, whole_s: float) -> tuple[MessageType, bytearray]: ...


class SetupExchange:
    """One end of a set-up and owner of its keys; `name` is the group's.

    Used by one thread at a time, except `check`, `keep` and `num_keys`. `deadline` bounds every wait for a key; the
    caller that makes the group sets it.
    """

    def __init__(self, stream: SetupStream, name: str) -> None:
        self._stream, self._prefix = stream, f"{name}/"
        self._keys: dict[str, bytes] = {}
        self._num_received, self._over = 0, False
        self.deadline = run_time()

    def send(self, kind: SetupKind, value: bytes = b"", key: str = "") -> None:
        """Send a message. Raises LinkLost."""
        raw = key.encode()
        self._stream.send([pack(MessageType.SETUP, _HEAD.pack(kind, len(raw)) + raw + value)])

    def receive(self, wanted: Sequence[SetupKind], timeout_s: float) -> tuple[SetupKind, bytes]:
        """Return the next message, which must be one of `wanted`; keys received before it are stored.

        Raises LinkLost, WireError, and the peer's refusal.
        """
        deadline = run_time() + timeout_s
        while True:
            kind, value = self._next(deadline)
            if kind in wanted:
                return kind, value
            if kind is not SetupKind.KEY:
                names = " or ".join(one.name for one in wanted)
                raise WireError(f"received {kind.name}, expected {names}")

    def finish(self, timeout_s: float) -> None:
        """Send DONE and receive the peer's; afterwards the store is closed and the stream belongs to the link."""
        self.send(SetupKind.DONE)
        self.receive([SetupKind.DONE], timeout_s)
        self._over = True

    def set(self, key: str, value: bytes) -> None:
        """Set a key on both sides. Raises LinkLost, WireError."""
        self.keep(key, value)
        if not self._over:
            self.send(SetupKind.KEY, value, self._prefix + key)

    def keep(self, key: str, value: bytes) -> None:
        """Set a key on this side only. Raises WireError."""
        key_bytes = len(self._prefix) + len(key.encode())
        if key_bytes > _MAX_KEY_BYTES or len(value) > _MAX_VALUE_BYTES:
            raise WireError(
                f"a key has {key_bytes} and its value {len(value)} bytes, but the limits are {_MAX_KEY_BYTES} and "
                f"{_MAX_VALUE_BYTES}"
            )
        if key not in self._keys and len(self._keys) >= _MAX_KEYS:
            raise WireError(f"the store of a group has more than {_MAX_KEYS} keys")
        self._keys[key] = value

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it. Raises LinkLost, WireError."""
        self.wait([key], max(0.0, self.deadline - run_time()))
        return self._keys[key]

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until all keys are set, never past the deadline. Raises LinkLost, WireError."""
        deadline = min(self.deadline, run_time() + timeout_s)
        while missing := [key for key in keys if key not in self._keys]:
            if self._over:
                raise LinkLost(f"the store of this group is closed and has no key {missing[0]!r}")
            kind, _ = self._next(deadline, waiting_for=missing[0])
            if kind is not SetupKind.KEY:
                raise WireError(f"received {kind.name}, expected the key {missing[0]!r}")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set here; reads nothing from the stream."""
        return all(key in self._keys for key in keys)

    def delete(self, key: str) -> bool:
        """Delete a key on this side."""
        return self._keys.pop(key, None) is not None

    @property
    def num_keys(self) -> int:
        """Number of keys that are set."""
        return len(self._keys)

    def _next(self, deadline: float, waiting_for: str = "") -> tuple[SetupKind, bytes]:
        left = deadline - run_time()
        if left <= 0:
            raise LinkLost(f"the peer did not finish in time{f' (missing key {waiting_for!r})' if waiting_for else ''}")
        kind, body = self._stream.receive_message(first_byte_s=left, whole_s=left)
        if kind is MessageType.REFUSE:
            refusal = decode(kind, body)
            assert isinstance(refusal, Refuse)
            raise from_name(refusal.error, f"the peer refused the link: {refusal.reason}")
        if kind is not MessageType.SETUP:
            raise WireError(f"received {kind.name} in the set-up of a group")
        self._num_received += 1
        if self._num_received > _MAX_RECEIVED:
            raise WireError(f"the set-up of a group has more than {_MAX_RECEIVED} messages")
        return self._read(body)

    def _read(self, body: bytearray) -> tuple[SetupKind, bytes]:
        try:
            kind, key_bytes = _HEAD.unpack_from(body)
            tail = bytes(body[_HEAD.size :])
            if key_bytes > len(tail):
                raise WireError(f"a key has {key_bytes} bytes, of which {len(tail)} are present")
            kind, key, value = SetupKind(kind), tail[:key_bytes].decode(), tail[key_bytes:]
        except (struct.error, ValueError) as error:
            raise WireError(f"malformed SETUP of {len(body)} bytes: {error}") from error
        if kind is SetupKind.KEY:
            if not key.startswith(self._prefix):
                raise WireError(f"the key {key[:80]!r} does not belong to the group {self._prefix!r}")
            self.keep(key.removeprefix(self._prefix), value)
        return kind, value
