"""Positions in time, height and width: those of transformers' Qwen2-VL, for any range of a prompt's tokens."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.grid_positions import GridPositions, positions_of_text
from engine.grid_rotary import GridRotary, columns_of, rotate_by_grid
from tests.engine.small_networks import GQA, network
from tests.engine.tiny_vision_models import IMAGE_TOKEN, VISION
from wire.errors import ConfigError
from wire.types import PromptImage

_PARTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4)
"""Text before an image, and the image's height and width."""


@cache
def _qwen() -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(CONFIG_MAPPING["qwen2_vl"](**VISION["qwen2_vl"])).model


def _images(parts: list[tuple[int, int, int]], tail: int) -> tuple[tuple[PromptImage, ...], int]:
    images, length = list[PromptImage](), 0
    for text, height, width in parts:
        images.append(PromptImage(length + text, height * width, b"a" * 32, (1, height, width)))
        length += text + height * width
    return tuple(images), length + tail


@given(_PARTS, st.integers(1, 5))
def test_positions_are_those_of_transformers(parts: list[tuple[int, int, int]], tail: int) -> None:
    images, length = _images(parts, tail)
    ids = torch.zeros(1, length, dtype=torch.int64)
    for image in images:
        ids[0, image.start : image.start + image.count] = IMAGE_TOKEN
    grids = [(1, 2 * image.grid[1], 2 * image.grid[2]) for image in images]
    expected, delta = _qwen().get_rope_index(
        ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=torch.tensor(grids) if grids else None
    )

    it = GridPositions(images)

    assert it.of(0, length).tolist() == expected[:, 0].T.flatten().tolist()
    assert it.of(length + 7, 1).tolist() == [length + 7 + int(delta)] * 3


@given(_PARTS, st.integers(1, 5), st.data())
def test_any_chunks_have_the_positions_of_the_whole(
    parts: list[tuple[int, int, int]], tail: int, data: st.DataObject
) -> None:
    images, length = _images(parts, tail)
    cut = data.draw(st.integers(0, length))
    it = GridPositions(images)

    assert it.of(0, cut) + it.of(cut, length - cut) == it.of(0, length)


def test_text_without_images_counts_its_tokens() -> None:
    assert positions_of_text(5, 2).tolist() == [5, 5, 5, 6, 6, 6]
    assert GridPositions(()).of(5, 2) == positions_of_text(5, 2)


def test_sections_take_the_three_positions_in_turn() -> None:
    assert list(columns_of((2, 3, 3, 1))) == [
        (0, slice(0, 2)), (1, slice(2, 5)), (2, slice(5, 8)), (0, slice(8, 9)),
    ]  # fmt: skip


@pytest.mark.parametrize("sections", [(2, 3, 4), (2, 3), (8, 0, 0)])
def test_sections_that_do_not_fit_the_heads_are_refused(sections: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"mrope_section is \[.*\], but must be positive numbers whose sum is 8,"):
        rotate_by_grid(network(LlamaConfig(**GQA)), sections)


def test_three_equal_positions_rotate_as_one() -> None:
    llama = network(LlamaConfig(**GQA))
    plain = llama.model.rotary_emb
    rotary, positions = GridRotary(plain, (2, 3, 3)), torch.arange(5)[None]

    three = rotary(torch.zeros(1), positions.expand(3, -1, -1))

    assert all(map(torch.equal, three, plain(torch.zeros(1), positions)))
