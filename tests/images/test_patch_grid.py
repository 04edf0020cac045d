"""Qwen2-VL's size rule, compared with transformers' image processor over random sizes and settings."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from images.patch_grid import PatchGrid
from tests.examples import examples
from wire.errors import InvalidRequest

sides = st.one_of(st.integers(1, 80), st.integers(1, 6000))


@given(width=sides, height=sides, least=st.integers(1, 200_000), spread=st.integers(0, 20_000_000))
@examples(400)
def test_the_count_is_that_of_the_processor(width: int, height: int, least: int, spread: int) -> None:
    size = {"shortest_edge": least, "longest_edge": least + spread}
    processor = Qwen2VLImageProcessorPil(size=size)
    rule = PatchGrid.of({"size": size}, patch=14, merge=2)
    try:
        patches = processor.get_number_of_image_patches(height, width)
    except ValueError:
        with pytest.raises(InvalidRequest, match="but the limit is 200"):
            rule.tokens(width, height)
        return

    tokens = rule.tokens(width, height)

    assert tokens.count * 4 == patches
    assert math.prod(tokens.grid) == tokens.count


@pytest.mark.parametrize("setting", [{"patch_size": 14, "merge_size": 2}, {"patch_size": 4, "merge_size": 1}])
@pytest.mark.parametrize("size", [(1, 1), (28, 56), (100, 37), (37, 100), (300, 2), (2, 300), (500, 500)])
def test_the_grid_is_that_of_the_processed_image(setting: dict[str, int], size: tuple[int, int]) -> None:
    limits: dict[str, Any] = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 280}}
    processed = Qwen2VLImageProcessorPil(**limits, **setting)(Image.new("RGB", size))
    time, rows, columns = processed["image_grid_thw"][0]
    merge = setting["merge_size"]

    tokens = PatchGrid.of(limits, setting["patch_size"], merge).tokens(*size)

    assert tokens.grid == (time, rows // merge, columns // merge)


def test_the_processors_older_names_of_its_limits_count() -> None:
    assert PatchGrid.of({"min_pixels": 9, "max_pixels": 99, "size": {"shortest_edge": 1}}, 14, 2) == PatchGrid(
        28, 9, 99
    )
    assert PatchGrid.of({}, 14, 2) == PatchGrid(28, 3136, 1003520)
