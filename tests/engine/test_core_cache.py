"""The engine core's prefix cache: what is not computed a second time, which prompts may use it, and equal answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.interface import Chunk, StepResult
from engine.step import PendingStep, StepBatch
from testing.engine.fake_model import FakeModel
from tests.engine.fake_engines import CONFIG, Answers, engine, prompt, run, wanted
from wire.types import PromptState

pytestmark = pytest.mark.usefixtures("runs_ahead")

CACHED = replace(CONFIG, block_size=16, num_blocks=24, max_model_len=200)


class Counted:
    """How many tokens a model has computed."""

    def __init__(self, model: FakeModel) -> None:
        self.tokens, self._launch = 0, model.launch
        model.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        self.tokens += len(batch.token_ids)
        return self._launch(batch, layer_done)

    def since(self) -> int:
        """Return how many since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens


@contextmanager
def counting_engine(**options: object) -> Iterator[tuple[EngineCore, Counted]]:
    with engine(replace(CACHED, **options.pop("config", {})), **options) as (core, model):  # type: ignore[arg-type]
        yield core, Counted(model)


def answer(core: EngineCore, state: PromptState) -> list[int]:
    """Run a prompt alone to its end and return its tokens, which must be those of the reference."""
    core.add(state)
    answers = run(core)
    assert answers.failed == []
    assert core.blocks.num_used == 0
    assert answers.tokens[state.prompt_id, 0] == wanted(state, 0, CACHED)
    return answers.tokens[state.prompt_id, 0]


def test_a_repeated_prompt_is_computed_from_its_first_new_token() -> None:
    with counting_engine() as (core, computed):
        first = prompt("p", 40, max_tokens=1)
        answer(core, first)
        assert computed.since() == 40

        answer(core, replace(first, prompt_id="same"))
        assert computed.since() == 40 - 32
        answer(core, replace(first, prompt_id="longer", token_ids=(*first.token_ids, *range(30))))
        assert computed.since() == 70 - 32
        answer(core, replace(first, prompt_id="other", token_ids=(7, *first.token_ids[1:])))
        assert computed.since() == 40


def test_the_last_token_is_computed_even_if_all_is_cached() -> None:
    with counting_engine() as (core, computed):
        state = prompt("p", 48, max_tokens=1)
        answer(core, state)
        computed.since()

        answer(core, replace(state, prompt_id="again"))
        assert computed.since() == 16


@pytest.mark.parametrize("identity", ["weights_digest", "dtype"])
def test_names_begin_with_the_models_weights_and_dtype(identity: str) -> None:
    model, state = FakeModel(CACHED), prompt("p", 32)
    other = FakeModel(CACHED if identity == "weights_digest" else replace(CACHED, dtype="bfloat16"))
    if identity == "weights_digest":
        other._info = replace(other.info, model=replace(other.info.model, weights_digest="other"))
    first, again, different = (
        EngineCore(one, max_num_seqs=1, max_num_batched_tokens=64, prefill_chunk_size=64).blocks.chain(state)
        for one in (model, model, other)
    )

    assert first.name(0, state.token_ids) == again.name(0, state.token_ids)
    assert first.name(0, state.token_ids).digest != different.name(0, state.token_ids).digest


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    with counting_engine() as (core, computed):
        turn = prompt("turn", 20, max_tokens=30)
        reported = answer(core, turn)
        computed.since()

        answer(core, replace(turn, prompt_id="next", token_ids=(*turn.token_ids, *reported, 5, 6, 7)))
        assert computed.since() == 53 - 48 + 29
        assert (core.load().prefix_tokens_found, core.load().prefix_tokens_found_decoded) == (48, 32), "20 were prompt"


def test_tenants_share_nothing() -> None:
    with counting_engine() as (core, computed):
        state = replace(prompt("p", 40, max_tokens=1), cache_salt="one")
        answer(core, state)
        computed.since()

        answer(core, replace(state, prompt_id="q", cache_salt="two"))
        assert computed.since() == 40
        answer(core, replace(state, prompt_id="r"))
        assert computed.since() == 8


def test_prompts_share_blocks_while_both_run() -> None:
    with counting_engine() as (core, _):
        state = prompt("p", 40, max_tokens=20, n=2, temperature=1.0, seed=3)
        core.add(state)
        answers = Answers()
        for _ in range(3):
            answers.take(core.step().tokens)
        before = core.blocks.num_used
        core.add(replace(state, prompt_id="twin"))
        answers.take(core.step().tokens)

        assert core.blocks.num_used == before + 1
        run(core, answers)
        for name in ("p", "twin"):
            assert [answers.tokens[name, i] for i in (0, 1)] == [wanted(state, i, CACHED) for i in (0, 1)]


def test_a_probe_neither_uses_the_cache_nor_fills_it() -> None:
    with counting_engine() as (core, computed):
        state = prompt("p", 40, max_tokens=1)
        answer(core, replace(state, prompt_id="probe", probe=True))
        assert (computed.since(), core.blocks.num_cached) == (40, 0)
        answer(core, state)
        answer(core, replace(state, prompt_id="probe", probe=True))

        assert computed.since() == 80
        assert (core.blocks.tokens_queried, core.blocks.tokens_found) == (32, 0)


def test_a_prompt_with_prompt_logprobs_is_computed_in_full() -> None:
    with counting_engine() as (core, computed):
        state = prompt("p", 40, max_tokens=1)
        answer(core, state)
        computed.since()

        core.add(replace(state, prompt_id="q", params=replace(state.params, prompt_logprobs=0)))
        run(core)
        assert computed.since() == 40


@pytest.mark.parametrize(
    "off", [{"prefix_caching": False}, {"config": {"block_size": 8}}], ids=["flag", "small blocks"]
)
def test_without_a_cache_nothing_is_kept(off: dict[str, object]) -> None:
    with counting_engine(**off) as (core, computed):
        state = prompt("p", 40, max_tokens=1)
        answer(core, state)
        answer(core, replace(state, prompt_id="again"))

        assert (computed.since(), core.blocks.num_cached) == (80, 0)


def test_cached_blocks_are_evicted_for_new_prompts() -> None:
    with counting_engine(config={"num_blocks": 4}) as (core, computed):
        answer(core, prompt("old", 50, max_tokens=10))
        assert core.blocks.num_cached == 3
        answer(core, prompt("new", 60, max_tokens=5))
        assert core.load().preemptions == 0
        computed.since()

        answer(core, replace(prompt("new", 60, max_tokens=5), prompt_id="new again"))
        assert computed.since() == 60 - 48 + 4


def test_a_prompt_starts_in_a_full_pool_where_others_hold_most_of_it() -> None:
    with counting_engine(config={"num_blocks": 6}) as (core, _):
        state = prompt("p", 64, max_tokens=9)
        core.add(state)
        answers = Answers()
        for _ in range(4):
            answers.take(core.step().tokens)
        assert core.blocks.num_free == 1
        core.add(replace(state, prompt_id="twin", token_ids=state.token_ids[:49]))
        answers.take(core.step().tokens)
        assert core.load().waiting == 1  # a block is left for the first
        core.cancel("p")
        answers.take(core.step().tokens)
        assert (core.load().waiting, core.load().running) == (0, 1)

        run(core, answers)
        assert answers.tokens["twin", 0] == wanted(replace(state, token_ids=state.token_ids[:49]), 0, CACHED)


def _cache_use(result: StepResult) -> list[tuple[str, int, int]]:
    assert all(seconds >= 0 for _, seconds, _, _ in result.computed)
    return [(prompt_id, cached, written) for prompt_id, _, cached, written in result.computed]


def test_cached_and_written_tokens_come_with_the_first_token() -> None:
    with counting_engine() as (core, _):
        state = prompt("p", 40, max_tokens=3)
        core.add(state)
        assert [_cache_use(core.step()) for _ in range(4)] == [[], [("p", 0, 32)], [], []]
        core.add(replace(state, prompt_id="q"))
        assert [_cache_use(core.step()) for _ in range(4)] == [[("q", 32, 0)], [], [], []]
        core.add(replace(state, prompt_id="h"), hold=True)
        (held,) = core.step().prefilled
        core.release("h")

        assert (held.cached_tokens, held.written_tokens) == (32, 0)


@pytest.mark.parametrize(("num_cached", "num_written"), [(0, 48), (16, 32)])
def test_tokens_named_again_after_a_swap_are_not_written_twice(num_cached: int, num_written: int) -> None:
    young, results = prompt("young", 60, max_tokens=3), []
    with counting_engine(config={"num_blocks": 7}, swap_bytes=1 << 20, chunk=1, tokens=8) as (core, _):
        if num_cached:
            answer(core, replace(young, prompt_id="start", token_ids=young.token_ids[: num_cached + 1]))
        core.add(prompt("old", 4, max_tokens=100))
        for _ in range(5):
            results.append(core.step())
        core.add(young)  # it is swapped out half computed, and its cached blocks are evicted
        while core.has_work():
            results.append(core.step())

        assert core.load().preemptions == 1
        assert [use for result in results for use in _cache_use(result)] == [
            ("old", 0, 0), ("young", num_cached, num_written)
        ]  # fmt: skip


def test_held_prompts_announce_cached_kv_with_the_first_chunk() -> None:
    with counting_engine(chunk=10) as (core, _):
        answer(core, prompt("p", 40, max_tokens=1))
        reported: list[Chunk] = []
        longer = replace(prompt("p", 40), prompt_id="h", token_ids=(*prompt("p", 40).token_ids, *range(20)))
        core.add(longer, hold=True)
        while not core.load().held_prompts:
            core.step(lambda layer, chunks: reported.extend(chunks))

        assert [(chunk.start, chunk.end) for chunk in reported] == [
            (0, 42), (0, 42), (42, 52), (42, 52), (52, 60), (52, 60)
        ]  # fmt: skip
        assert all(len(chunk.block_ids) == 4 for chunk in reported)
        core.release("h")


def test_a_resumed_sequence_finds_its_outputs_too() -> None:
    with counting_engine() as (core, computed):
        state = prompt("p", 40, max_tokens=40)
        tokens = answer(core, state)
        computed.since()

        core.add(replace(state, prompt_id="resumed", outputs=(tuple(tokens[:30]),)))
        answers = run(core, Answers({("resumed", 0): tokens[:30]}))
        assert answers.tokens["resumed", 0] == tokens
        assert computed.since() == (40 - 32) + (70 - 64) + 9


def test_a_received_prompt_is_found_by_the_next_one() -> None:
    state = prompt("p", 40, max_tokens=6)
    with counting_engine() as (core, computed):
        answer(core, replace(state, prompt_id="elsewhere"))
        block_ids, num_held = core.blocks.take(3, ())
        assert num_held == 0
        for source in (2, 1, 0):  # as if another instance had sent them; block 2 is the first of the fresh ones
            core._model.copy_block(source, block_ids[source])
        received = replace(state, cache_salt="t", outputs=((wanted(state, 0, CACHED)[0],),))
        core.admit(received, block_ids)
        answers = run(core, Answers({("p", 0): list(received.outputs[0])}))
        assert answers.tokens["p", 0] == wanted(state, 0, CACHED)
        computed.since()

        answer(core, replace(state, prompt_id="next", cache_salt="t"))
        assert computed.since() == 8 + 5


def test_a_failed_step_names_no_uncomputed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting_engine() as (core, computed):
        state = prompt("p", 40, max_tokens=1)
        core.add(state)
        with monkeypatch.context() as patch:
            patch.setattr(core._model, "launch", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
            assert [name for name, _ in core.step().failed] == ["p"]

        assert (core.blocks.num_cached, core.blocks.num_used) == (0, 0)
        answer(core, state)
        assert computed.since() == 40
