"""The body of a chat with images, whose data URLs are encoded piece by piece while the body is sent."""

from base64 import b64encode
from collections.abc import Iterator

from wire.types import WorkerChat

_PIECE_BYTES = 3 * 2**17  # whole groups of base64; encoded in less than a millisecond
_END = b"}"


class WorkerChatBody:
    """A body that can be sent repeatedly: `fields`, a JSON object, and the conversation with its images."""

    def __init__(self, fields: bytes, chat: WorkerChat) -> None:
        self._head, self._tails = fields[:-1] + b"," + chat.json[0], chat.json[1:]
        self._images = [(f"data:{media_type};base64,".encode(), data) for media_type, data in chat.images]

    def __len__(self) -> int:
        """Return the number of bytes."""
        encoded = sum(len(url) + (len(data) + 2) // 3 * 4 for url, data in self._images)
        return len(self._head) + encoded + sum(map(len, self._tails)) + len(_END)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes in pieces."""
        yield self._head
        for (url, data), tail in zip(self._images, self._tails, strict=True):
            yield url
            for at in range(0, len(data), _PIECE_BYTES):
                yield b64encode(data[at : at + _PIECE_BYTES])
            yield tail
        yield _END
