"""The fake model: its pool holds the bytes it announces, and its reference predicts its tokens."""

import dataclasses
from collections.abc import Iterator

import pytest

from engine.sampling.counter_hash import hash64
from engine.step import BatchSequence, SampleRow, StepBatch
from scheduler.workers.proof import difference
from testing.engine.fake_model import FakeConfig, FakeModel, expected_tokens, fake_info, kv_bytes
from testing.engine.fake_output import logprobs_of
from wire.kv_layout import Heads
from wire.types import SamplingParams, TokenOutput

CONFIG = FakeConfig(salt=5, block_size=4, num_blocks=8)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = (11, 12, 13, 14, 15, 16)


@pytest.fixture
def model() -> Iterator[FakeModel]:
    made = FakeModel(CONFIG)
    yield made
    made.close()


def whole_prompt(
    block_ids: tuple[int, ...], params: SamplingParams = GREEDY, *, banned: int | None = None
) -> StepBatch:
    sample = SampleRow(len(PROMPT) - 1, params, 0, 0, () if banned is None else (banned,))
    return StepBatch(PROMPT, (BatchSequence(0, len(PROMPT), block_ids),), (sample,))


def test_every_token_of_every_tensor_lies_in_its_slot(model: FakeModel) -> None:
    model.launch(whole_prompt((6, 2))).collect()

    layout = model.info.layout
    for tensor, spec in enumerate(layout.tensors):
        for position, token_id in enumerate(PROMPT):
            (run,) = layout.runs(tensor, (6, 2), position, position + 1)
            stored = bytes(model.memories[0].buffer[run.offset : run.offset + run.length])
            assert stored == kv_bytes(token_id, position, tensor, CONFIG.salt, spec.head_bytes, Heads(0, spec.heads))


def test_the_first_token_is_the_expected_one(model: FakeModel) -> None:
    assert tuple(model.launch(whole_prompt((6, 2))).collect().token_ids) == expected_tokens(
        CONFIG, PROMPT, GREEDY, count=1, salts=[5]
    )


def test_a_damaged_byte_of_any_tensor_changes_a_later_token() -> None:
    good = expected_tokens(CONFIG, PROMPT, GREEDY, count=4, salts=[5])

    for position in range(len(PROMPT)):
        salts = [5] * len(PROMPT)
        salts[position] = 6
        assert expected_tokens(CONFIG, PROMPT, GREEDY, count=4, salts=[*salts, 5]) != good


def test_the_token_depends_on_the_bytes_in_the_pool(model: FakeModel) -> None:
    (good,) = model.launch(whole_prompt((6, 2))).collect().token_ids
    layout = model.info.layout
    for tensor in range(len(layout.tensors)):
        (run,) = layout.runs(tensor, (2,), 1, 2)
        model.memories[0].buffer[run.offset] ^= 1
    row = StepBatch((), (BatchSequence(6, 0, (6, 2)),), (SampleRow(-1, GREEDY, 0, 0),))

    assert model.launch(row).collect().token_ids != [good]


def test_layers_are_announced_in_order_after_their_bytes(model: FakeModel) -> None:
    layout, seen = model.info.layout, list[tuple[int, list[bool]]]()

    def layer_done(layer: int) -> None:
        firsts = [next(layout.runs(tensor, (6,), 0, 1)).offset for tensor in range(len(layout.tensors))]
        seen.append((layer, [any(model.memories[0].buffer[at : at + 8]) for at in firsts]))

    model.launch(whole_prompt((6, 2)), layer_done)

    assert seen == [(0, [True, True, False, False]), (1, [True, True, True, True])]


def test_copy_block_copies_every_tensor(model: FakeModel) -> None:
    (good,) = model.launch(whole_prompt((6, 2))).collect().token_ids
    model.copy_block(6, 0)
    model.copy_block(2, 7)
    row = StepBatch((), (BatchSequence(6, 0, (0, 7)),), (SampleRow(-1, GREEDY, 0, 0),))

    assert model.launch(row).collect().token_ids == [good]


def test_only_sampling_depends_on_seed_and_sequence() -> None:
    def answer(temperature: float, seed: int, sequence: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=4, temperature=temperature, seed=seed)
        return expected_tokens(CONFIG, PROMPT, params, count=4, salts=[5], sequence=sequence)

    assert answer(0, 1, 0) == answer(0, 2, 1)
    assert len({answer(1, 1, 0), answer(1, 2, 0), answer(1, 1, 1)}) == 3


def test_a_banned_token_is_not_chosen(model: FakeModel) -> None:
    (free,) = model.launch(whole_prompt((6, 2))).collect().token_ids

    assert model.launch(whole_prompt((6, 2), banned=free)).collect().token_ids == [free + 1]


def test_delays_are_slept_through_the_injected_callable() -> None:
    slept = list[float]()
    model = FakeModel(FakeConfig(num_blocks=2, num_layers=2, step_seconds=1.0, token_seconds=0.5), slept.append)
    model.launch(whole_prompt((0,)))
    model.close()

    assert slept == [2.0, 2.0]


def test_fakes_of_other_salts_are_the_same_model() -> None:
    mine, theirs = fake_info(FakeConfig(salt=1)), fake_info(FakeConfig(salt=2))

    assert (mine.model, mine.layout.tensors) == (theirs.model, theirs.layout.tensors)


MIXED = ((0, "k", 3, 4), (0, "v", 3, 4), (1, "latent", 1, 6), (3, "k", 2, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kv_tensors", [(), MIXED])
def test_tokens_do_not_depend_on_the_number_of_ranks(
    ranks: int, kv_tensors: tuple[tuple[int, str, int, int], ...]
) -> None:
    config = dataclasses.replace(CONFIG, kv_tensors=kv_tensors, ranks=ranks)
    model = FakeModel(config)

    (first,) = model.launch(whole_prompt((6, 2))).collect().token_ids
    model.close()

    assert (first,) == expected_tokens(config, PROMPT, GREEDY, count=1, salts=[5])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_misplaced_byte_on_any_rank_changes_a_token(ranks: int) -> None:
    config = dataclasses.replace(CONFIG, kv_tensors=MIXED, ranks=ranks, num_blocks=16)
    good, bad = FakeModel(config), FakeModel(config)

    for pool in bad.memories:
        for tensor in range(len(MIXED)):
            for model in (good, bad):
                model.launch(whole_prompt((6, 2))).collect()
            (run,) = pool.layout.runs(tensor, (6, 2), 3, 4)
            pool.buffer[run.offset + run.length - 1] ^= 1

            assert answers(good, 2 * len(MIXED) * ranks) != answers(bad, 2 * len(MIXED) * ranks), (ranks, tensor)
    good.close()
    bad.close()


def answers(model: FakeModel, count: int) -> list[int]:
    """The next tokens, each computed after the one before."""
    tokens: list[int] = []
    for position in range(count):
        length = len(PROMPT) + position
        part = BatchSequence(length, 1, (6, 2, *range(7, 16)))
        tokens += model.launch(StepBatch((7,), (part,), (SampleRow(0, GREEDY, 0, position),))).collect().token_ids
    return tokens


def test_swapped_heads_change_the_bytes() -> None:
    both = kv_bytes(11, 3, 0, 5, 16, Heads(0, 2))

    assert kv_bytes(11, 3, 0, 5, 16, Heads(1, 2)) + kv_bytes(11, 3, 0, 5, 16, Heads(0, 1)) != both
    assert kv_bytes(11, 3, 0, 5, 16, Heads(0, 1)) + kv_bytes(11, 3, 0, 5, 16, Heads(1, 2)) == both


def test_a_layer_without_kv_is_announced_like_any_other() -> None:
    model, seen = FakeModel(dataclasses.replace(CONFIG, kv_tensors=MIXED, num_layers=6)), list[int]()

    model.launch(whole_prompt((6, 2)), seen.append)
    model.close()

    assert seen == [0, 1, 2, 3, 4, 5]


def test_running_ahead_computes_in_launch_order() -> None:
    in_turn, ahead = FakeModel(CONFIG), FakeModel(dataclasses.replace(CONFIG, runs_ahead=True))
    known = in_turn.launch(whole_prompt((6, 2))).collect().token_ids[0]
    last = StepBatch((0,), (BatchSequence(len(PROMPT), 1, (6, 2)),), (SampleRow(0, GREEDY, 0, 1),))

    first = ahead.launch(whole_prompt((6, 2)))
    second = ahead.launch(dataclasses.replace(last, carried=((0, 0),)))
    assert not any(ahead.memories[0].buffer), "nothing is computed yet"

    expected = in_turn.launch(dataclasses.replace(last, token_ids=(known,))).collect().token_ids
    assert second.collect().token_ids == expected
    assert first.collect().token_ids == [known]
    in_turn.close()
    ahead.close()


def test_a_copied_block_includes_launched_writes() -> None:
    ahead = FakeModel(dataclasses.replace(CONFIG, runs_ahead=True))
    launched = ahead.launch(whole_prompt((6, 2)))

    ahead.copy_block(6, 7)

    layout, buffer = ahead.info.layout, ahead.memories[0].buffer
    for tensor in range(len(layout.tensors)):
        source, target = (next(iter(layout.runs(tensor, [block], 0, layout.block_size))) for block in (6, 7))
        assert buffer[source.offset :][: source.length] == buffer[target.offset :][: target.length]
        assert any(buffer[target.offset :][: target.length])
    assert tuple(launched.collect().token_ids) == expected_tokens(CONFIG, PROMPT, GREEDY, count=1, salts=[5])
    ahead.close()


def test_answers_of_two_models_differ_however_close_their_tokens_are() -> None:
    """Of 1000 tokens, 9 have some of the five likeliest of a given one: chance must not prove a pair of workers."""

    def answer(checksum: int) -> list[TokenOutput]:
        token_id = hash64(checksum, 0) % 1000
        return [TokenOutput("p", 0, 0, token_id, logprobs=logprobs_of(checksum, token_id, 5, 1000))]

    answers = [answer(checksum) for checksum in range(1000)]
    close = [one for one in answers[1:] if abs((one[0].token_id or 0) - (answers[0][0].token_id or 0)) in range(1, 5)]
    assert close
    assert None not in [difference(answers[0], one) for one in close]
