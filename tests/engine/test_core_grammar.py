"""A grammar constrains a prompt's outputs wherever it runs, and does not affect others. On the fake model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.grammar.interface import Bits, Grammar, Matcher
from tests.engine.fake_engines import CONFIG, Answers, engine, prompt, run, wanted
from wire.errors import InvalidGrammar

STEP = 7


class Ladder:
    """A grammar whose output token i is i modulo STEP, for at most `length` tokens."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        return OnLadder(self.length)


class OnLadder:
    """The position of a sequence."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    @property
    def finished(self) -> bool:
        return False

    @property
    def is_free(self) -> bool:
        return False

    @property
    def is_free_for_two(self) -> bool:
        return False

    def advance(self, token_id: int) -> bool:
        taken = token_id % STEP == self.position % STEP
        self.position += taken
        return taken

    def replay(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self.advance(token_id):
                raise InvalidGrammar(f"{token_id} is not allowed")

    def fill(self, row: Bits) -> None:
        if self.position >= self.length:
            raise InvalidGrammar(f"no token may follow the {self.position} that are there")
        bits = np.arange(CONFIG.vocab_size) % STEP == self.position % STEP
        packed = np.packbits(bits, bitorder="little")
        row.view(np.uint8)[: len(packed)] = packed


def is_climbing(token_ids: Sequence[int]) -> bool:
    return bool(token_ids) and all(token_id % STEP == i % STEP for i, token_id in enumerate(token_ids))


def generate_alone(name: str, grammar: Grammar | None = None) -> list[int]:
    with engine() as (core, _):
        core.add(prompt(name, 9), grammar=grammar)
        return run(core).tokens[name, 0]


@pytest.mark.usefixtures("runs_ahead")
def test_a_grammar_constrains_only_its_own_prompts_sequences() -> None:
    drawn = prompt("bound", 9, temperature=1.0, n=3)
    with engine() as (core, _):
        core.add(drawn, grammar=Ladder())
        core.add(prompt("free", 9))
        answers = run(core)

    outputs = [answers.tokens["bound", i] for i in range(3)]
    assert all(is_climbing(one) and len(one) == drawn.params.max_tokens for one in outputs)
    assert len({tuple(one) for one in outputs}) > 1
    assert answers.tokens["free", 0] == wanted(prompt("free", 9))


@pytest.mark.usefixtures("runs_ahead")
def test_outputs_are_equal_after_a_hand_off_or_resume() -> None:
    whole = generate_alone("a", Ladder())
    state = prompt("a", 9)
    with engine() as (p, _):
        p.add(state, hold=True, grammar=Ladder())
        (prefilled,) = p.step().prefilled
        p.release("a")
    with engine() as (d, _):
        d.add(replace(state, outputs=(tuple(whole[:4]),)), grammar=Ladder())
        resumed = Answers(tokens={("a", 0): whole[:4]})

        assert run(d, resumed).tokens["a", 0] == whole
    assert prefilled.state.outputs == ((whole[0],),)
    assert is_climbing(whole)


@pytest.mark.usefixtures("runs_ahead")
def test_an_early_cancel_stops_no_other_sequence_resuming() -> None:
    drawn = prompt("bound", 9, temperature=1.0, n=3)
    with engine() as (core, _):
        core.add(drawn, hold=True, grammar=Ladder())
        core.cancel("bound", 1)
        (held,) = run(core, until_held=1).prefilled
        core.release("bound")

        assert all(is_climbing(one) for one in held.state.outputs)
        core.add(held.state, grammar=Ladder())
        resumed = Answers(tokens={("bound", i): [*one] for i, one in enumerate(held.state.outputs)})
        outputs = [*run(core, resumed).tokens.values()]

    assert all(is_climbing(one) and len(one) == drawn.params.max_tokens for one in outputs)


@pytest.mark.usefixtures("runs_ahead")
def test_a_stuck_grammar_ends_its_own_prompt_with_its_reason() -> None:
    with engine() as (core, _):
        core.add(prompt("short", 9), grammar=Ladder(length=3))
        core.add(prompt("free", 9))
        answers: Answers = run(core)

        ((name, error),) = answers.failed
        assert (name, type(error)) == ("short", InvalidGrammar)
        assert "no token may follow the 3 that are there" in str(error)
        assert is_climbing(answers.tokens["short", 0])
        assert answers.tokens["free", 0] == wanted(prompt("free", 9))
        assert core.blocks.num_used == 0


@pytest.mark.usefixtures("runs_ahead")
def test_a_prompt_whose_sequences_are_all_stuck_fails_once() -> None:
    with engine() as (core, _):
        core.add(prompt("short", 9, temperature=1.0, n=3), grammar=Ladder(length=3))
        answers = run(core)

        assert [name for name, _ in answers.failed] == ["short"]


@pytest.mark.usefixtures("runs_ahead")
def test_outputs_so_far_that_the_grammar_does_not_allow_are_refused() -> None:
    with engine() as (core, _), pytest.raises(InvalidGrammar, match="5 is not allowed"):
        core.add(replace(prompt("a", 9), outputs=((0, 5),)), grammar=Ladder())


@pytest.mark.usefixtures("runs_ahead")
def test_a_preempted_prompt_resumes_its_grammar() -> None:
    states = [prompt(f"p{i}", 20, max_tokens=40) for i in range(5)]
    with engine(config=replace(CONFIG, num_blocks=20)) as (core, _):
        for state in states:
            core.add(state, grammar=Ladder())
        answers = run(core)
        assert core.load().preemptions > 0

    for state in states:
        assert is_climbing(answers.tokens[state.prompt_id, 0])
        assert answers.tokens[state.prompt_id, 0] == _with_room(state.prompt_id)


def _with_room(name: str) -> list[int]:
    with engine() as (core, _):
        core.add(prompt(name, 20, max_tokens=40), grammar=Ladder())
        return run(core).tokens[name, 0]
