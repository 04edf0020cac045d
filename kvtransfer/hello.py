"""HELLO and WELCOME: the messages that two instances exchange before the first frame, and the checks on them.

HELLO | protocol u32 | sender epoch u64 | link epoch u64 | receiver epoch u64 | nonce 16 bytes | flags u32 |
      | sender rank u16 | sender ranks u16 | receiver rank u16 | receiver ranks u16 | block size u32 | blocks u64 |
      | tensors u32 | per tensor: layer u32, heads u32, dim u32 |
          | texts: sender id, receiver id, transport, then per tensor: name, dtype |
WELCOME | receiver epoch u64 | link epoch u64 | flags u32 |

Flag 1: frames carry digests. A link has them if either side requests them.
"""

import struct
from dataclasses import dataclass

from kvtransfer.inflow import SendingRank
from kvtransfer.link_codec import WireError, pack, pack_text, unpack_texts
from kvtransfer.link_messages import MessageType
from wire.errors import Incompatible, InstanceLost
from wire.kv_layout import KvTensor, PoolLayout, Rank, check_rank, describe_difference
from wire.types import PROTOCOL_VERSION

_HEAD = struct.Struct("!IQQQ16sIHHHHIQI")
_TENSOR = struct.Struct("!III")
_WELCOME = struct.Struct("!QQI")
_DIGESTS = 1
NONCE_BYTES = 16
_MAX_TENSORS = 8_192
_MAX_POOL_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a link: the sender, the intended receiver, and the layout of the sending rank's pool.

    Ranks count from 0; `tensors` are those of the whole model; a rank holds only its heads of them. `nonce` is random.
    """

    protocol_version: int
    sender_id: str
    sender_epoch: int
    link_epoch: int
    receiver_id: str
    receiver_epoch: int
    transport: str
    block_size: int
    num_blocks: int
    tensors: tuple[KvTensor, ...]
    nonce: bytes = bytes(NONCE_BYTES)
    digests: bool = True
    sender_rank: int = 0
    sender_ranks: int = 1
    receiver_rank: int = 0
    receiver_ranks: int = 1

    @property
    def source(self) -> SendingRank:
        """The sending rank."""
        return SendingRank(self.sender_id, self.sender_epoch, Rank(self.sender_rank, self.sender_ranks))

    @property
    def layout(self) -> PoolLayout:
        """Layout of the sending rank's pool. Raises ValueError for invalid numbers."""
        return PoolLayout(
            self.tensors, num_blocks=self.num_blocks, block_size=self.block_size, rank=self.source.rank
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver accepts the link; `digests` is the setting of this link."""

    receiver_epoch: int
    link_epoch: int
    digests: bool = True


def encode_hello(hello: Hello) -> bytes:
    """Return prefix and body of HELLO."""
    texts = b"".join(map(pack_text, (hello.sender_id, hello.receiver_id, hello.transport)))
    names = [pack_text(text) for tensor in hello.tensors for text in (tensor.name, tensor.dtype)]
    shapes = [_TENSOR.pack(tensor.layer, tensor.heads, tensor.head_dim) for tensor in hello.tensors]
    head = _HEAD.pack(
        hello.protocol_version, hello.sender_epoch, hello.link_epoch, hello.receiver_epoch, hello.nonce,
        _DIGESTS if hello.digests else 0, hello.sender_rank, hello.sender_ranks, hello.receiver_rank,
        hello.receiver_ranks, hello.block_size, hello.num_blocks, len(hello.tensors),
    )  # fmt: skip
    return pack(MessageType.HELLO, head + b"".join(shapes) + texts + b"".join(names))


def decode_hello(body: bytes | bytearray) -> Hello:
    """Decode HELLO. Raises WireError."""
    try:
        head = _HEAD.unpack_from(body)
        version, sender_epoch, link_epoch, receiver_epoch, nonce, flags, *ranks, block_size, num_blocks, count = head
        if count > _MAX_TENSORS or flags & ~_DIGESTS:
            raise WireError(
                f"HELLO names {count} KV tensors (the limit is {_MAX_TENSORS}) and flags {flags:#x} "
                f"(known: {_DIGESTS:#x})"
            )
        end = _HEAD.size + count * _TENSOR.size
        shapes = list(_TENSOR.iter_unpack(memoryview(body)[_HEAD.size : end]))
        sender, receiver, transport, *names = unpack_texts(memoryview(body)[end:], 3 + 2 * count)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed HELLO of {len(body)} bytes: {error}") from error
    tensors = tuple(
        KvTensor(layer=layer, name=name, heads=heads, head_dim=head_dim, dtype=dtype)
        for (layer, heads, head_dim), name, dtype in zip(shapes, names[::2], names[1::2], strict=True)
    )
    return Hello(
        protocol_version=version, sender_id=sender, sender_epoch=sender_epoch, link_epoch=link_epoch,
        receiver_id=receiver, receiver_epoch=receiver_epoch, transport=transport, block_size=block_size,
        num_blocks=num_blocks, tensors=tensors, nonce=nonce, digests=bool(flags & _DIGESTS), sender_rank=ranks[0],
        sender_ranks=ranks[1], receiver_rank=ranks[2], receiver_ranks=ranks[3],
    )  # fmt: skip


def encode_welcome(welcome: Welcome) -> bytes:
    """Return prefix and body of WELCOME."""
    return pack(MessageType.WELCOME, _WELCOME.pack(welcome.receiver_epoch, welcome.link_epoch, int(welcome.digests)))


def decode_welcome(body: bytes | bytearray) -> Welcome:
    """Decode WELCOME. Raises WireError."""
    try:
        receiver_epoch, link_epoch, flags = _WELCOME.unpack(body)
        return Welcome(receiver_epoch, link_epoch, bool(flags & _DIGESTS))
    except struct.error as error:
        raise WireError(f"malformed WELCOME of {len(body)} bytes: {error}") from error


def check_hello(hello: Hello, *, instance_id: str, epoch: int, layout: PoolLayout) -> PoolLayout:
    """Return the sender's layout. Raises Incompatible or InstanceLost with both values."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Incompatible(f"KV protocol version {PROTOCOL_VERSION} here, {hello.protocol_version} there")
    if (hello.receiver_id, hello.receiver_epoch) != (instance_id, epoch):
        raise InstanceLost(
            f"the link is for {hello.receiver_id} epoch {hello.receiver_epoch:x}, "
            f"but this is {instance_id} epoch {epoch:x}"
        )
    intended = Rank(hello.receiver_rank, hello.receiver_ranks)
    if intended != layout.rank:
        raise Incompatible(f"the link is for {intended} of {instance_id}, but this is {layout.rank}")
    difference = describe_difference(layout.model_tensors, hello.tensors)
    if difference is not None:
        raise Incompatible(f"{difference} ({instance_id} here, {hello.sender_id} there)")
    try:
        check_rank(hello.source.rank)
    except ValueError as error:
        raise Incompatible(f"{hello.sender_id} claims to be {error}") from error
    pool_bytes = hello.num_blocks * hello.block_size * sum(tensor.token_bytes for tensor in layout.model_tensors)
    if not 0 < pool_bytes <= _MAX_POOL_BYTES:
        raise Incompatible(
            f"a pool of {hello.num_blocks} blocks of {hello.block_size} has {pool_bytes} bytes, "
            f"but must have 1 to {_MAX_POOL_BYTES}"
        )
    return hello.layout
