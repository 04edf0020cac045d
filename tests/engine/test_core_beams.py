"""Beam search in the whole engine equals transformers' own: in a batch, across a hand-off, and after preemption."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.interface import Prefilled
from engine.loader import load_model
from engine.oracle import load_plain
from engine.reference_decoding import ReferenceDecoder
from tests.engine.fake_engines import CONFIG, Answers, prompt, run
from tests.engine.fake_engines import engine as fake_engine
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import InvalidRequest
from wire.types import Beam, BeamSearch, FinishReason, PromptState, SamplingParams, TokenLogprobs

STOPS = tuple(range(4, 60, 5))
PROMPTS = [
    tuple(random.Random(seed).randrange(3, VOCAB_SIZE - 20) for _ in range(length))
    for seed, length in enumerate((5, 16, 40, 33))
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def decoder(path: Path) -> ReferenceDecoder:
    return ReferenceDecoder(load_plain(path, "float32"))


@contextmanager
def core_of(path: Path, *, kv_bytes: int = 4 << 20, chunk: int = 24, swap_bytes: int = 0) -> Iterator[EngineCore]:
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=kv_bytes, num_threads=1).model
    core = EngineCore(
        model, max_num_seqs=24, max_num_batched_tokens=64, prefill_chunk_size=chunk, swap_bytes=swap_bytes
    )
    yield core
    core.blocks.check()
    assert core.blocks.num_used == 0
    core.close()


def beam_prompt(name: str, token_ids: tuple[int, ...], max_tokens: int = 16, **search: object) -> PromptState:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=2, best_of=4, stop_token_ids=STOPS,
        beam_search=BeamSearch(**search),  # type: ignore[arg-type]
    )  # fmt: skip
    return PromptState(name, f"request-{name}", token_ids, params)


def states() -> list[PromptState]:
    """Of "b" the log probabilities of the three best tokens are requested, of "c" those of two listed ones."""
    made = [
        beam_prompt("a", PROMPTS[0]),
        beam_prompt("b", PROMPTS[1], early_stopping=True),
        beam_prompt("c", PROMPTS[2], length_penalty=0.0, early_stopping="never"),
        beam_prompt("d", PROMPTS[3], length_penalty=2.0),
    ]
    for at, described in ((1, {"logprobs": 3}), (2, {"logprobs": 0, "logprob_token_ids": (9, 17)})):
        made[at] = replace(made[at], params=replace(made[at].params, **described))
    return made


def hypotheses(answers: Answers, name: str) -> list[list[int]]:
    return [tokens for (prompt_id, _), tokens in sorted(answers.tokens.items()) if prompt_id == name]


def assert_equal(answers: Answers, decoder: ReferenceDecoder) -> None:
    assert answers.failed == []
    for state in states():
        decoded = decoder.decode(state.token_ids, state.params)
        wanted = [list(one.token_ids) for one in decoded]
        assert hypotheses(answers, state.prompt_id) == wanted, state.prompt_id
        for index, one in enumerate(decoded):
            assert_described(answers.logprobs.get((state.prompt_id, index), []), one.logprobs)
        for index, tokens in enumerate(wanted):
            stopped = tokens[-1] in STOPS
            assert answers.finish[state.prompt_id, index] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def assert_described(found: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs]) -> None:
    assert [(one.rank, one.top_ids) for one in found] == [(one.rank, one.top_ids) for one in wanted]
    values, expected = ([[one.logprob, *one.top_logprobs] for one in every] for every in (found, wanted))
    assert values == [pytest.approx(one, abs=1e-4) for one in expected]


@pytest.mark.parametrize(
    ("kv_bytes", "swap_bytes", "preempts"),
    [(4 << 20, 0, False), (96 << 10, 0, True), (96 << 10, 1 << 20, True)],
    ids=["room-for-all", "rebuilt", "put-aside"],
)
def test_beams_equal_transformers_in_a_batch_and_after_preemption(
    path: Path, decoder: ReferenceDecoder, kv_bytes: int, swap_bytes: int, preempts: bool
) -> None:
    with core_of(path, kv_bytes=kv_bytes, swap_bytes=swap_bytes) as core:
        for state in states():
            core.add(state)
        core.add(PromptState("plain", "r", PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.0)))

        answers = run(core)

        assert (core.load().preemptions > 0) == preempts
    assert_equal(answers, decoder)


def test_a_beam_search_is_handed_off_and_sends_only_its_end(path: Path, decoder: ReferenceDecoder) -> None:
    with core_of(path) as p, core_of(path) as d:
        for state in states():
            p.add(state, hold=True)
        held = run(p, until_held=len(states()))
        answers = Answers()
        for prefilled in held.prefilled:
            _hand_over(p, d, prefilled)
        run(d, answers)

    assert held.tokens == {}
    assert all(sum(not beam.done for beam in prefilled.state.beams) == 4 for prefilled in held.prefilled)
    assert_equal(answers, decoder)


def test_a_search_that_finishes_at_its_first_token_is_not_sent(path: Path, decoder: ReferenceDecoder) -> None:
    state = beam_prompt("a", PROMPTS[1], max_tokens=1)
    with core_of(path) as core:
        core.add(state, hold=True)
        answers = run(core)

    wanted = [list(one.token_ids) for one in decoder.decode(state.token_ids, state.params)]
    assert [prefilled.finished for prefilled in answers.prefilled] == [True]
    assert hypotheses(answers, "a") == wanted


@pytest.mark.usefixtures("runs_ahead")
def test_a_cancelled_search_frees_every_beam() -> None:
    with fake_engine() as (core, _):
        core.add(prompt("a", 9, n=2, best_of=4, beam_search=BeamSearch()))
        core.step()
        core.step()
        endings = core.cancel("a")

        assert [(ending.sequence, ending.finish) for ending in endings] == [(0, "cancelled"), (1, "cancelled")]
        assert core.blocks.num_used == 0
        assert not core.has_work()


@pytest.mark.parametrize(
    "shaping",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"logit_bias": ((9, 5.0), (221, 2.0), (149, -3.0)), "repetition_penalty": 0.8, "min_tokens": 4},
        {"bad_words": tuple((first, last) for first in range(0, VOCAB_SIZE, 2) for last in range(3, 8))[:1000]},
    ],
    ids=["repetition", "presence, frequency", "bias, repetition, min_tokens", "bad_words"],
)
def test_penalties_count_each_beams_own_tokens(path: Path, decoder: ReferenceDecoder, shaping: dict[str, Any]) -> None:
    requests = [replace(state, params=replace(state.params, **shaping)) for state in states()]
    with core_of(path) as core:
        for state in requests:
            core.add(state)
        answers = run(core)

    for state in requests:
        wanted = [list(one.token_ids) for one in decoder.decode(state.token_ids, state.params)]
        assert hypotheses(answers, state.prompt_id) == wanted, state.prompt_id


@pytest.mark.parametrize("length_penalty", [100.0, pytest.param(-100.0, marks=pytest.mark.long)])
def test_a_length_penalty_at_its_limit_ends_like_any_other(length_penalty: float) -> None:
    """From 1,209 tokens on, length ** 100 overflows a float."""
    with fake_engine(config=replace(CONFIG, max_model_len=1300, num_blocks=1300)) as (core, _):
        state = prompt("a", 5, max_tokens=1250, n=1, best_of=2, beam_search=BeamSearch(length_penalty, "never"))
        core.add(state)
        answers = run(core)

    assert answers.failed == []
    assert len(answers.tokens["a", 0]) == 1250


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(
    ("beams", "words"),
    [
        ((Beam((1,), -1.0),) * 5, "5 live and 0 finished beams are given, but the width is 4"),
        ((Beam((1,), -1.0), Beam((1, 2), -2.0)), r"live beams have \[1, 2\] tokens"),
        ((Beam((1,) * 10, -1.0),), "must share one length, at least 1 and below the limit of 10"),
        ((Beam((), -1.0),), r"live beams have \[0\] tokens"),
        ((Beam((1,), -1.0), Beam((), -1.0, done=True)), r"finished beams have \[0\] tokens, but must have from"),
        ((Beam((1,), float("nan")),), "must be finite"),
        ((Beam((1,), -2.0), Beam((2,), -1.0)), "sorted by score"),
        ((Beam((1,), -1.0, done=True),), "every beam has finished already"),
        ((Beam((1,), -1.0, logprobs=(TokenLogprobs(-1.0, 1),)),), "must have log probabilities if they are requested"),
    ],
)
def test_beams_that_no_search_can_continue_from_are_refused(beams: tuple[Beam, ...], words: str) -> None:
    state = replace(prompt("a", 9, n=2, best_of=4, beam_search=BeamSearch()), beams=beams)
    with fake_engine() as (core, _):
        with pytest.raises(InvalidRequest, match=words):
            core.add(state)
        assert not core.has_work()


@pytest.mark.usefixtures("runs_ahead")
def test_a_search_wider_than_the_step_is_refused_with_both_numbers() -> None:
    wide = prompt("a", 9, n=1, best_of=17, beam_search=BeamSearch())
    with fake_engine() as (core, _), pytest.raises(InvalidRequest, match="best_of is 17: it must be from 1 to 16"):
        core.add(wide)


def _hand_over(p: EngineCore, d: EngineCore, prefilled: Prefilled) -> None:
    """Move a held prompt's KV from one pool to the other, and admit it there."""
    layout, state = p.info.layout, prefilled.state
    source = p._batch.held[state.prompt_id].stem
    assert source is not None
    count = len(state.token_ids)
    target = d.blocks.allocate(layout.num_blocks_for(count))
    for tensor in range(len(layout.tensors)):
        data = b"".join(
            bytes(p.memories[0].buffer[piece.offset : piece.offset + piece.length])
            for piece in layout.runs(tensor, source.block_ids, 0, count)
        )
        at = 0
        for piece in layout.runs(tensor, target, 0, count):
            d.memories[0].buffer[piece.offset : piece.offset + piece.length] = data[at : at + piece.length]
            at += piece.length
    d.admit(state, target)
    p.release(state.prompt_id)
