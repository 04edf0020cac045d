"""Every family with a vision tower: its text network alone, given the tower's embeddings, equals plain transformers.

The embeddings are those of transformers' own tower, called here.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import Model
from tests.engine.fake_engines import run
from tests.engine.tiny_models import VOCAB_SIZE
from tests.engine.tiny_vision_models import VISION, VisionOracle, make_vision_model, with_pictures


class _Family(NamedTuple):
    name: str
    path: Path
    oracle: VisionOracle


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Family]:
    """Return a function that makes a family's model once."""

    @cache
    def make(name: str) -> _Family:
        path = make_vision_model(name, tmp_path_factory.mktemp("vision") / name)
        return _Family(name, path, VisionOracle(path))

    return make


@pytest.mark.parametrize("name", VISION)
def test_text_alone_equals_transformers(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    states = [with_pictures(_text(length, length), [], f"p{length}") for length in (1, 19, 40)]
    with _core(it.path) as core:
        for state in states:
            core.add(state)
        answers = run(core)

    assert [answers.tokens[state.prompt_id, 0] for state in states] == [it.oracle.generate(s, []) for s in states]


@pytest.mark.parametrize("name", VISION)
def test_the_oracle_of_verify_is_the_text_network(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    state = with_pictures(_text(30, 30), [])

    greedy = Oracle(it.path, "float32").generate_greedy([state.token_ids], 10, ignore_eos=True)

    assert greedy == [it.oracle.generate(state, [])]


@contextmanager
def _core(path: Path, *, chunk: int = 13, **options: Any) -> Iterator[EngineCore]:
    core = EngineCore(_model(path, **options), max_num_seqs=8, max_num_batched_tokens=48, prefill_chunk_size=chunk)
    try:
        yield core
        core.blocks.check()
    finally:
        core.close()


def _model(path: Path, *, kv_cache_memory: int = 4 << 20, backend: str = "cpu") -> Model:
    return load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=kv_cache_memory, num_threads=1, attention_backend=backend
    ).model


def _text(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)]
