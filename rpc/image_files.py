"""The files of a prompt's images on a session's stream: in pieces before its command, so that no message is large.

    piece, piece, ... | prefill or generate, whose images say how many bytes each has

A large message would hold up the event loop, the commands behind it, and the stream's keepalive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wire import cluster_pb2 as pb
from wire.errors import InvalidRequest
from wire.messages import Command, Generate, Prefill
from wire.prompt_images import MAX_IMAGE_BYTES
from wire.types import PromptImage

PIECE_BYTES = 256 * 2**10


def images_of(command: Command) -> tuple[PromptImage, ...]:
    """Return the images whose files go with the command."""
    return command.prompt.images if isinstance(command, Prefill | Generate) else ()


def pieces(images: Sequence[PromptImage]) -> Iterator[pb.CommandMessage]:
    """Yield the messages that precede the command of a prompt with these images."""
    for image in images:
        for start in range(0, len(image.data), PIECE_BYTES):
            yield pb.CommandMessage(image_piece=image.data[start : start + PIECE_BYTES])


class ImageFiles:
    """Mutable: the pieces received for the next command of one session, bounded."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def take(self, piece: bytes) -> None:
        """Keep a piece; beyond the limit nothing is kept, and the command will be refused."""
        self._num_bytes += len(piece)
        if self._num_bytes <= MAX_IMAGE_BYTES:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def attach(self, command: Command, sizes: Sequence[int]) -> Command:
        """Return the command with the files received for it. Raises InvalidRequest if they do not have these sizes."""
        if self._num_bytes > MAX_IMAGE_BYTES:
            text = f"the images have {self._num_bytes} bytes, but the limit is {MAX_IMAGE_BYTES}"
            raise InvalidRequest(text, "images")
        if self._num_bytes != sum(sizes):
            raise InvalidRequest(f"images: {self._num_bytes} bytes were received, but {sum(sizes)} announced", "images")
        if not isinstance(command, Prefill | Generate) or not self._num_bytes:
            return command
        files, images, start = b"".join(self._pieces), list[PromptImage](), 0
        for image, size in zip(command.prompt.images, sizes, strict=True):
            images.append(replace(image, data=files[start : start + size]))
            start += size
        return replace(command, prompt=replace(command.prompt, images=tuple(images)))

    def clear(self) -> None:
        """Forget the pieces: their command was passed on or refused."""
        self._pieces, self._num_bytes = [], 0
