"""The thinking before an answer: its budget, the grammar after it, and the same state from the tokens so far."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.grammar.interface import Matcher
from engine.thinking import ThinkingMatcher
from tests.engine.fake_engines import CONFIG, Answers, engine, prompt, run, wanted
from tests.engine.test_core_grammar import STEP, Ladder, OnLadder
from wire.errors import InvalidGrammar
from wire.types import Thinking

START, END = 398, 401
OPEN, CLOSED = Thinking(START, END, is_open=True), Thinking(START, END)


def allowed(matcher: Matcher) -> set[int]:
    """Return the tokens that may follow."""
    row = np.zeros(-(-CONFIG.vocab_size // 32), dtype=np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: CONFIG.vocab_size]
    tokens = set(np.nonzero(bits)[0].tolist())
    assert matcher.is_free == (len(tokens) == CONFIG.vocab_size)
    return tokens


ALL = set(range(CONFIG.vocab_size))
FIRST = {token for token in ALL if token % STEP == 0}
SECOND = {token for token in ALL if token % STEP == 1}


@pytest.mark.parametrize(
    ("rule", "has_grammar", "tokens", "expected"),
    [
        (OPEN, False, (), ALL),
        (replace(OPEN, budget=0), False, (), {END}),
        (replace(OPEN, budget=2), False, (5,), ALL),
        (replace(OPEN, budget=2), False, (5, 6), {END}),
        (replace(OPEN, budget=2, num_before=2), False, (), {END}),
        (replace(OPEN, budget=2, num_before=9), False, (START,), None),
        (replace(OPEN, budget=2, num_before=1), False, (START,), ALL),
        (replace(OPEN, budget=2, num_before=1), False, (START, 5), {END}),
        (replace(OPEN, budget=2), False, (START, 5), ALL),
        (replace(OPEN, budget=2), False, (START, 5, 6), {END}),
        (replace(OPEN, budget=2), False, (START, START), ALL),
        (replace(OPEN, budget=2), False, (START, START, START), {END}),
        (replace(OPEN, budget=2), False, (5, START, START), {END}),
        (replace(OPEN, budget=2), False, (5, START, 6), {END}),
        (replace(CLOSED, budget=2), False, (START, START, 5), {END}),
        (replace(OPEN, budget=2), False, (5, 6, END), ALL),
        (replace(OPEN, budget=2), False, (END, 5, 6, 7, START, 5), ALL),
        (replace(OPEN, budget=2), False, (END, START, 5, 6), {END}),
        (replace(CLOSED, budget=0), False, (5, 6, 7), ALL),
        (replace(CLOSED, budget=0), False, (5, START), {END}),
        (OPEN, True, (), ALL),
        (OPEN, True, (5, START, 6), ALL),
        (OPEN, True, (5, END), FIRST),
        (OPEN, True, (END, 0), SECOND),
        (replace(OPEN, budget=1), True, (5,), {END}),
        (replace(OPEN, budget=1), True, (5, END, 7), SECOND),
        (CLOSED, True, (), {START, *FIRST}),
        (CLOSED, True, (START, 5, END), FIRST),
        (CLOSED, True, (0,), SECOND),
        (replace(CLOSED, budget=0), True, (START,), {END}),
        (OPEN, True, (END, 5), None),
        (CLOSED, True, (0, START), None),
        (OPEN, True, (END, START), None),
        (replace(OPEN, budget=1), False, (5, 6), None),
    ],
)
def test_what_may_follow_depends_on_the_tokens_so_far(
    rule: Thinking, has_grammar: bool, tokens: tuple[int, ...], expected: set[int] | None
) -> None:
    def made() -> ThinkingMatcher:
        return ThinkingMatcher(rule, OnLadder(1000) if has_grammar else None)

    stepped, replayed = made(), made()

    if expected is None:
        assert [stepped.advance(token) for token in tokens][-1] is False
        with pytest.raises(InvalidGrammar, match="allow"):
            replayed.replay(tokens)
        return
    assert all(stepped.advance(token) for token in tokens)
    replayed.replay(tokens)
    assert allowed(stepped) == allowed(replayed) == expected
    assert stepped.is_free_for_two == (expected == ALL and all(frees(made, tokens, one) for one in (5, START, END)))


def frees(made: Callable[[], ThinkingMatcher], tokens: tuple[int, ...], token: int) -> bool:
    """Return whether any token may follow after one more."""
    matcher = made()
    matcher.replay((*tokens, token))
    return matcher.is_free


@pytest.mark.usefixtures("runs_ahead")
def test_a_budget_ends_the_thinking_of_its_own_prompt() -> None:
    with engine() as (core, _):
        core.add(prompt("open", 9, thinking=replace(OPEN, budget=3), n=2, temperature=1.0))
        core.add(prompt("free", 9))
        core.add(prompt("closed", 9, thinking=replace(CLOSED, budget=3)))
        answers = run(core)

    for sequence in range(2):
        tokens = answers.tokens["open", sequence]
        assert (tokens.index(END), len(tokens)) == (3, 10)
    for name in ("free", "closed"):
        assert answers.tokens[name, 0] == wanted(prompt(name, 9))


@pytest.mark.covers("B.reasoning.4")
@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize("budget", [0, 3, None])
def test_thinking_goes_on_after_a_hand_off_or_a_retry(budget: int | None) -> None:
    end_token = END if budget is not None else wanted(prompt("a", 9))[4]  # that the model chooses by itself
    state = prompt("a", 9, thinking=replace(OPEN, end_token_id=end_token, budget=budget))
    with engine() as (core, _):
        core.add(state, grammar=Ladder())
        whole = run(core).tokens["a", 0]
    end = whole.index(end_token)
    assert end == (4 if budget is None else budget)
    assert all(token % STEP == at % STEP for at, token in enumerate(whole[end + 1 :]))

    with engine() as (p, _):
        p.add(state, hold=True, grammar=Ladder())
        (prefilled,) = p.step().prefilled
        p.release("a")
    assert prefilled.state.outputs == ((whole[0],),)
    for done in range(1, len(whole)):
        with engine() as (d, _):
            d.add(replace(state, outputs=(tuple(whole[:done]),)), grammar=Ladder())

            assert run(d, Answers(tokens={("a", 0): whole[:done]})).tokens["a", 0] == whole


def test_outputs_beyond_the_budget_are_refused() -> None:
    state = prompt("a", 9, thinking=replace(OPEN, budget=1))
    with (
        engine() as (core, _),
        pytest.raises(InvalidGrammar, match="output token 1 is 6, which the grammar or"),
    ):
        core.add(replace(state, outputs=((5, 6),)))
