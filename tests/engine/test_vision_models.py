"""Every family with a vision tower: its text network alone, given the tower's embeddings, equals plain transformers.

The embeddings are those of transformers' own tower, called here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.core import EngineCore
from engine.interface import Chunk, Prefilled
from engine.loader import load_model
from engine.oracle import Oracle
from engine.ranks.load import RanksOptions, load_ranks
from tests.engine.fake_engines import Answers, run
from tests.engine.step_runner import copy_chunks
from tests.engine.tiny_vision_models import (
    VISION,
    VisionOracle,
    asked,
    make_vision_model,
    text_ids,
    with_pictures,
)
from wire.convert import describe_prompt, read_prompt
from wire.errors import InternalError, NoCapacity

_BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, heads, head_dim, float32


class _Family(NamedTuple):
    name: str
    path: Path
    oracle: VisionOracle
    expected: list[list[int]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Family]:
    """Return a function that makes a family's model once."""

    @cache
    def make(name: str) -> _Family:
        path = make_vision_model(name, tmp_path_factory.mktemp("vision") / name)
        oracle = VisionOracle(path)
        return _Family(name, path, oracle, [oracle.generate(*one) for one in asked(name)])

    return make


@pytest.mark.often("gemma3", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_every_image_changes_what_transformers_answers(family: Callable[[str], _Family], name: str) -> None:
    expected = [tuple(one) for one in family(name).expected]

    assert len(set(expected)) == len(expected)


@pytest.mark.often("gemma3", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_text_alone_equals_transformers(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    states = [with_pictures(text_ids(length, length), [], f"p{length}") for length in (1, 19, 40)]
    with _core(it.path) as core:
        for state in states:
            core.add(state)
        answers = run(core)

    assert [answers.tokens[state.prompt_id, 0] for state in states] == [it.oracle.generate(s, []) for s in states]


@pytest.mark.combinations(1)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", VISION)
def test_images_cut_by_chunks_equal_transformers(family: Callable[[str], _Family], name: str, backend: str) -> None:
    it = family(name)
    with _core(it.path, backend=backend) as core:
        _add_all(core, it)
        answers = run(core)

    assert (answers.failed, _outputs(answers)) == ([], it.expected)


@pytest.mark.often("gemma3")
@pytest.mark.parametrize("name", VISION)
def test_without_native_kernels_it_equals_transformers(
    family: Callable[[str], _Family], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = family(name)
    monkeypatch.setenv("PDSERVE_NATIVE", "off")
    with _core(it.path) as core:
        _add_all(core, it)
        answers = run(core)

    assert (answers.failed, _outputs(answers)) == ([], it.expected)


@pytest.mark.often("llava-rebuilt", "qwen2_5_vl-copied")
@pytest.mark.parametrize("options", [{}, {"swap_bytes": 1 << 20}], ids=["rebuilt", "copied"])
@pytest.mark.parametrize("name", VISION)
def test_preempted_prompts_with_images_answer_the_same(
    family: Callable[[str], _Family], name: str, options: dict[str, Any]
) -> None:
    it = family(name)
    states = [(replace(one, params=replace(one.params, max_tokens=50)), pictures) for one, pictures in asked(name)[:4]]
    with _core(it.path, kv_cache_memory=12 * _BLOCK_BYTES, prefix_caching=False, **options) as core:
        for state, pictures in states:
            core.add(state, embeddings=it.oracle.embeddings(pictures))
        answers = run(core)
        preemptions = core.load().preemptions

    assert preemptions > 0
    assert (answers.failed, _outputs(answers)) == ([], [it.oracle.generate(*one) for one in states])


@pytest.mark.parametrize("name", VISION)
def test_all_sequences_of_a_prompt_see_its_images(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    state, pictures = asked(name)[2]
    with _core(it.path) as core:
        core.add(replace(state, params=replace(state.params, n=3)), embeddings=it.oracle.embeddings(pictures))
        answers = run(core)

    assert [answers.tokens[state.prompt_id, index] for index in range(3)] == [it.expected[2]] * 3


@pytest.mark.often("gemma3", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_cached_kv_is_found_for_equal_images_alone(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    (first, one), (second, other) = asked(name)[:2]
    assert first.token_ids == second.token_ids
    found, outputs = list[int](), list[list[int]]()
    with _core(it.path) as core:
        for number, (state, pictures) in enumerate([(first, one), (second, other), (first, one), (second, other)]):
            core.add(replace(state, prompt_id=f"{number}"), embeddings=it.oracle.embeddings(pictures))
            outputs.append(run(core).tokens[f"{number}", 0])
            found.append(core.blocks.tokens_found)

    assert outputs == it.expected[:2] * 2
    cached = (len(first.token_ids) - 1) // 16 * 16
    assert found == [0, 0, cached, 2 * cached]


@pytest.mark.often("gemma3", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_handed_off_images_are_needed_by_the_prefill_alone(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    with _core(it.path, backend="reference") as p, _core(it.path) as d:
        answers, prefilled, chunks = _prefill_all(p, it)
        for held in prefilled:
            state = read_prompt(describe_prompt(held.state))
            target = d.blocks.allocate(d.info.layout.num_blocks_for(len(state.token_ids)))
            copy_chunks(p, d, chunks, state.prompt_id, target)
            d.admit(state, target)
            p.release(state.prompt_id)
        run(d, answers)

    assert (answers.failed, _outputs(answers)) == ([], it.expected)


def test_a_prompt_without_its_images_fails_if_its_kv_is_dropped(family: Callable[[str], _Family]) -> None:
    it = family("llava")
    with _core(it.path) as p, _core(it.path, kv_cache_memory=9 * _BLOCK_BYTES, prefix_caching=False) as d:
        answers, prefilled, chunks = _prefill_all(p, it)
        for held in prefilled[:2]:
            target = d.blocks.allocate(d.info.layout.num_blocks_for(len(held.state.token_ids)))
            copy_chunks(p, d, chunks, held.state.prompt_id, target)
            d.admit(replace(held.state, params=replace(held.state.params, max_tokens=60)), target)
            p.release(held.state.prompt_id)
        for held in prefilled[2:]:
            p.release(held.state.prompt_id)
        run(d, answers)

        assert [(name, type(error)) for name, error in answers.failed] == [("p1", NoCapacity)]
        assert len(answers.tokens["p0", 0]) == 60
        assert (d.blocks.num_used, d.load().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made[:1], "the prompt has 2 images, but embeddings for 1"),
        (lambda made: [made[0], made[1][:-4]], "image 1 have 4092 bytes, but must have 4096"),
    ],
)
def test_embeddings_that_are_not_the_images_are_refused(
    family: Callable[[str], _Family], change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    it = family("llava")
    state, pictures = asked("llava")[2]
    with _core(it.path) as core:
        with pytest.raises(InternalError, match=message):
            core.add(state, embeddings=change(it.oracle.embeddings(pictures)))
        assert not core.has_work()


@pytest.mark.long
@pytest.mark.usefixtures("native_libraries")
@pytest.mark.parametrize("name", VISION)
def test_two_ranks_answer_the_same(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    options = RanksOptions(cores=((), ()), num_threads=1, step_s=60.0)
    loaded = load_ranks(
        it.path, dtype="float32", block_size=16, kv_cache_memory=4 << 20, ranks=options, on_lost=lambda error: None
    )
    core = EngineCore(loaded.model, max_num_seqs=8, max_num_batched_tokens=48, prefill_chunk_size=13)
    try:
        _add_all(core, it)
        answers = run(core)
    finally:
        core.close()

    assert (answers.failed, _outputs(answers)) == ([], it.expected)


@pytest.mark.often("llava", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_the_oracle_of_verify_is_the_text_network(family: Callable[[str], _Family], name: str) -> None:
    it = family(name)
    state = with_pictures(text_ids(30, 30), [])

    greedy = Oracle(it.path, "float32").generate_greedy([state.token_ids], 10, ignore_eos=True)

    assert greedy == [it.oracle.generate(state, [])]


def _add_all(core: EngineCore, it: _Family, *, hold: bool = False) -> None:
    for state, pictures in asked(it.name):
        core.add(state, hold=hold, embeddings=it.oracle.embeddings(pictures))


def _prefill_all(p: EngineCore, it: _Family) -> tuple[Answers, list[Prefilled], list[Chunk]]:
    """Compute and hold every prompt; return their first tokens, descriptions and chunks."""
    _add_all(p, it, hold=True)
    answers, prefilled, chunks = Answers(), list[Prefilled](), list[Chunk]()
    while p.has_work():
        result = p.step(lambda layer, now: chunks.extend(now) if layer == 0 else None)
        answers.take(result.tokens)
        prefilled.extend(result.prefilled)
    return answers, prefilled, chunks


def _outputs(answers: Answers) -> list[list[int]]:
    return [answers.tokens[f"p{number}", 0] for number in range(len(answers.tokens))]


@contextmanager
def _core(path: Path, *, kv_cache_memory: int = 4 << 20, backend: str = "cpu", **options: Any) -> Iterator[EngineCore]:
    model = load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=kv_cache_memory, num_threads=1, attention_backend=backend
    ).model
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=48, prefill_chunk_size=13, **options)
    try:
        yield core
        core.blocks.check()
    finally:
        core.close()
