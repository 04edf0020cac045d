"""The files of images in pieces: any sizes arrive whole, each with its own command, and nothing is kept for another."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.image_files import PIECE_BYTES, ImageFiles, images_of, pieces
from wire.errors import InvalidRequest
from wire.messages import Cancel, Command, Generate, Prefill, Reserve
from wire.prompt_images import MAX_IMAGE_BYTES
from wire.types import PromptImage, PromptState, SamplingParams, Ticket

_TICKET = Ticket("0" * 32, 1, "decode-0", 1, 0, 10.0, ())


def _state(*files: bytes) -> PromptState:
    images = tuple(PromptImage(i, 1, b"a" * 32, (1, 1, 1), file) for i, file in enumerate(files))
    return PromptState("p", "r", (1,) * (len(files) + 1), SamplingParams(max_tokens=1), images=images)


def _without_files(command: Generate) -> Generate:
    images = tuple(replace(image, data=b"") for image in command.prompt.images)
    return replace(command, prompt=replace(command.prompt, images=images))


def _files(command: Command) -> list[bytes]:
    return [image.data for image in images_of(command)]


@given(st.lists(st.sampled_from([0, 1, 5, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]), max_size=3))
def test_files_of_any_size_arrive_whole(sizes: list[int]) -> None:
    files = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    command, received = Generate(_state(*files)), ImageFiles()

    for message in pieces(images_of(command)):
        assert 0 < len(message.image_piece) <= PIECE_BYTES
        received.take(message.image_piece)

    assert _files(received.attach(_without_files(command), sizes)) == files


def test_only_commands_that_compute_a_prompt_have_files() -> None:
    state = _state(b"GIF")
    commands: list[Command] = [Generate(state), Prefill(state, _TICKET), Reserve(state), Cancel("p")]

    assert [_files(command) for command in commands] == [[b"GIF"], [b"GIF"], [], []]


@pytest.mark.parametrize("sizes", [[2], [4], [1, 1], []])
def test_files_other_than_announced_are_refused(sizes: list[int]) -> None:
    received = ImageFiles()
    received.take(b"GIF")

    with pytest.raises(InvalidRequest, match=rf"images: 3 bytes were received, but {sum(sizes)} announced"):
        received.attach(Generate(_state(*(b"" for _ in sizes))), sizes)


def test_more_than_the_limit_is_not_kept_but_refused() -> None:
    received, piece = ImageFiles(), bytes(MAX_IMAGE_BYTES // 4)
    for _ in range(6):
        received.take(piece)

    with pytest.raises(InvalidRequest, match=f"images have {6 * len(piece)} bytes, but the limit is {MAX_IMAGE_BYTES}"):
        received.attach(Generate(_state(b"")), [6 * len(piece)])
    assert received._pieces == []


def test_files_of_a_refused_command_are_not_those_of_the_next() -> None:
    received = ImageFiles()
    received.take(b"GIF")
    received.clear()
    received.take(b"PNG")

    assert _files(received.attach(Generate(_state(b"")), [3])) == [b"PNG"]
