"""Chunks end inside no image whose tokens see each other, and every image gets its turn whatever the limits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.reference import visible
from engine.step import BatchSequence, StepBatch
from engine.whole_images import spans_of, spans_within, whole_count
from tests.engine.fake_engines import CONFIG, engine, prompt, run
from wire.types import PromptImage, PromptState

_SPANS = ((4, 10), (10, 12), (20, 60))


def _image(start: int, count: int) -> PromptImage:
    return PromptImage(start, count, b"a" * 32, (1, 1, count))


def _with_images(name: str, length: int, *spans: tuple[int, int]) -> PromptState:
    images = tuple(_image(start, end - start) for start, end in spans)
    return replace(prompt(name, length, max_tokens=2), images=images)


@pytest.mark.parametrize(
    ("start", "count", "whole"),
    [
        (0, 3, 3), (0, 4, 4), (0, 5, 4), (0, 10, 10), (0, 11, 10), (0, 12, 12), (4, 1, 6), (4, 7, 6), (7, 1, 3),
        (7, 3, 3), (12, 30, 8), (20, 1, 40), (59, 1, 1), (60, 9, 9), (12, 0, 0), (20, 0, 0), (30, 0, 0),
    ],
)  # fmt: skip
def test_a_chunk_ends_before_an_image_or_after_it(start: int, count: int, whole: int) -> None:
    assert whole_count(_SPANS, start, count) == whole


@given(st.integers(0, 70), st.integers(1, 70))
def test_whole_chunks_cut_no_image_and_make_progress(start: int, count: int) -> None:
    end = start + whole_count(_SPANS, start, count)

    assert end > start
    assert not any(first < end < last for first, last in _SPANS)


def test_the_images_of_a_chunk_are_those_it_touches() -> None:
    assert spans_of((_image(4, 6), _image(10, 2))) == ((4, 10), (10, 12))
    assert [spans_within(_SPANS, *chunk) for chunk in ((0, 4), (0, 5), (9, 1), (10, 2), (12, 8))] == [
        (), ((4, 10),), ((4, 10),), ((10, 12),), (),
    ]  # fmt: skip


def test_tokens_of_an_image_see_each_other_within_the_window() -> None:
    part = BatchSequence(2, 5, (), spans=((3, 6),))
    seen = [
        [key for key in range(7) if visible(part, 0, window, torch.device("cpu"))[row, key]]
        for window in (None, 3)
        for row in range(5)
    ]

    assert seen == [
        [0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2], [1, 2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5], [4, 5, 6],
    ]  # fmt: skip


def test_steps_hold_images_whole_and_exceed_the_limit_by_one() -> None:
    config = replace(CONFIG, num_blocks=256, max_model_len=300, takes_images=True, images_attend_within=True)
    states = [_with_images("a", 60, (10, 50)), _with_images("b", 60, (0, 40), (40, 60)), _with_images("c", 30)]
    with engine(config, tokens=16, chunk=8) as (core, model):
        batches = list[StepBatch]()
        launch = model.launch

        def record(batch: StepBatch, layer_done: object = None) -> object:
            batches.append(batch)
            return launch(batch, layer_done)  # type: ignore[arg-type]

        model.launch = record  # type: ignore[method-assign,assignment]
        for state in states:
            core.add(state, embeddings=[bytes(8 * image.count) for image in state.images])
        answers = run(core)

    assert answers.failed == []
    assert {key: len(tokens) for key, tokens in answers.tokens.items()} == {("a", 0): 2, ("b", 0): 2, ("c", 0): 2}
    parts = [part for batch in batches for part in batch.sequences]
    assert all(part.start <= first or part.start < end <= part.kv_length for part in parts for first, end in part.spans)
    assert all(end <= part.kv_length for part in parts for _, end in part.spans)
    assert max(len(batch.token_ids) for batch in batches) <= 16 + 40
