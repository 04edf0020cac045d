"""Judges of `pdserve verify --features` accept right results and name wrong ones. On a scripted reference."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from engine.reference_decoding import Decoded
from pdserve.feature_cases import FeatureCase, Vocabulary, make_cases
from pdserve.feature_judges import (
    CaseOutput,
    CasePrompt,
    best_of_all,
    equal_logprobs,
    equal_prompt_logprobs,
    equal_tokens,
    equal_vectors,
    reads_as,
)
from pdserve.feature_preemption import SHORT, SWAP
from pdserve.feature_runs import FeatureOutputs
from pdserve.verify_features import (
    EQUAL,
    MEANINGLESS,
    WRONG,
    Cell,
    judge,
    report,
    settled,
    small_pool_tokens,
)
from wire.types import Pooling, SamplingParams, TokenLogprobs

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
ASK = CasePrompt((1, 2), GREEDY)
TOLD = (TokenLogprobs(-0.5, 1, (7,), (-0.5,)), TokenLogprobs(-1.5, 2, (9,), (-1.0,)))


class Script:
    """A reference that returns the given sequences."""

    def __init__(self, *sequences: Decoded) -> None:
        self.sequences = list(sequences)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> list[Decoded]:
        return self.sequences

    def score_prompt(self, prompt: Sequence[int], params: SamplingParams) -> list[TokenLogprobs | None]:
        return [None, TOLD[0]]

    def hidden_states(self, prompt: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[1.0, 2.0, 2.0], [3.0, 4.0, 0.0]], dtype=torch.float64)


def script(*sequences: Decoded) -> Any:
    return Script(*sequences)


def test_equal_tokens_names_the_first_difference() -> None:
    reference = script(Decoded((5, 6, 7)))

    assert equal_tokens(reference, [ASK], [CaseOutput({0: [5, 6, 7]})]) is None
    assert equal_tokens(reference, [ASK], [CaseOutput({0: [5, 8, 7]})]) == (
        "prompt 0: sequence 0, token 1: (8,) in place of (6,)"
    )
    assert equal_tokens(reference, [ASK], [CaseOutput({0: [5, 6]})]) == (
        "prompt 0: sequence 0, token 2: nothing in place of (7,)"
    )
    assert equal_tokens(reference, [ASK], [CaseOutput()]) == "prompt 0: the number of sequences is 0, not 1"


def test_log_probabilities_may_differ_by_rounding_alone() -> None:
    reference = script(Decoded((7, 8), TOLD))
    off = replace(TOLD[1], logprob=-1.5002)

    assert equal_logprobs(reference, [ASK], [CaseOutput({0: [7, 8]}, {0: list(TOLD)})]) is None
    assert "output 1: a log probability is 0.0002 off" in str(
        equal_logprobs(reference, [ASK], [CaseOutput({0: [7, 8]}, {0: [TOLD[0], off]})])
    )
    assert "the number of log probabilities is 1, not 2" in str(
        equal_logprobs(reference, [ASK], [CaseOutput({0: [7, 8]}, {0: [TOLD[0]]})])
    )


def test_prompt_logprobs_are_compared_with_the_next_tokens() -> None:
    reference = script(Decoded((7, 8)))

    def judged(token_ids: list[int], *reported: TokenLogprobs | None) -> str:
        return str(
            equal_prompt_logprobs(reference, [ASK], [CaseOutput({0: token_ids}, prompt_logprobs=list(reported))])
        )

    assert judged([7, 8], None, TOLD[0]) == "None"
    assert "token 0" in judged([7, 8], TOLD[0], TOLD[0])
    assert "the number of log probabilities is 4, not 2" in judged([7, 8], None, TOLD[0], None, TOLD[0])
    assert "token 1: (9,) in place of (8,)" in judged([7, 9], None, TOLD[0])


def test_the_best_of_all_sequences_must_be_the_references() -> None:
    reference = script(Decoded((3,)), Decoded((1,)))
    prompt = CasePrompt((1,), SamplingParams(max_tokens=1, n=2, best_of=3))
    sums = (-2.0, -3.0, -1.0)
    likely: dict[int, list[TokenLogprobs | None]] = {i: [TokenLogprobs(value, 1)] for i, value in enumerate(sums)}

    assert best_of_all(reference, [prompt], [CaseOutput({0: [1], 1: [2], 2: [3]}, dict(likely))]) is None
    assert best_of_all(reference, [prompt], [CaseOutput({0: [1], 1: [3], 2: [2]}, dict(likely))]) is not None


def test_vectors_are_compared_as_requested() -> None:
    prompt = CasePrompt((1, 2), GREEDY, Pooling(how="mean", dimensions=2))
    wanted = torch.tensor([2.0, 3.0], dtype=torch.float64)
    good = tuple((wanted / wanted.norm()).tolist())

    assert equal_vectors(script(), [prompt], [CaseOutput(vector=good)]) is None
    assert "is 0.01 off" in str(equal_vectors(script(), [prompt], [CaseOutput(vector=(good[0] + 0.01, good[1]))]))
    assert "the vector has 3 values in place of 2" in str(
        equal_vectors(script(), [prompt], [CaseOutput(vector=(*good, 0.0))])
    )


def test_a_text_judge_ignores_the_eos_at_the_end() -> None:
    prompt = CasePrompt((1,), SamplingParams(max_tokens=2, stop_token_ids=(0,)))
    reads = reads_as(lambda ids: "".join(map(str, ids)), lambda text: text == "12")

    assert reads(script(), [prompt], [CaseOutput({0: [1, 2, 0]})]) is None
    assert reads(script(), [prompt], [CaseOutput({0: [1, 3]})]) == (
        "prompt 0: the text '13' does not have the requested form"
    )
    assert reads(script(), [prompt], [CaseOutput()]) == "a prompt has no sequence"


def test_unequal_cells_and_features_are_named() -> None:
    case = FeatureCase("greedy", (replace(ASK, params=replace(GREEDY, max_tokens=1)),), equal_tokens)
    right, other = CaseOutput({0: [5]}, path="handoff"), CaseOutput({0: [5]}, path="local")
    columns = {
        "combined": FeatureOutputs({"greedy": [other]}),
        "P/D shm": FeatureOutputs({"greedy": [other]}),
        "P/D tcp": FeatureOutputs({"greedy": [right]}),
        "P/D none": FeatureOutputs(),
        SWAP: FeatureOutputs({"greedy": [right]}),
    }

    cells = judge(case, columns, script(Decoded((5,))))

    assert cells == [
        Cell(EQUAL), Cell(WRONG, "its path was local, not handoff"), Cell(EQUAL), Cell(WRONG, "not served"),
        Cell(MEANINGLESS, SHORT),
    ]  # fmt: skip
    assert report(list(columns), {"greedy": cells}) == [
        "feature  combined  P/D shm  P/D tcp  P/D none  after preemption (swap)",
        "greedy   equal     WRONG    equal    WRONG     n/a",
        "WRONG: greedy, P/D shm: its path was local, not handoff",
        "WRONG: greedy, P/D none: not served",
        f"n/a: greedy, after preemption (swap): {SHORT}",
        "not equal: greedy",
    ]
    assert report(["combined"], {"greedy": [Cell(EQUAL)]})[-1] == "equal: 1 feature in 1 way of serving"
    assert report(["combined", SWAP], {"greedy": [Cell(EQUAL), Cell(MEANINGLESS, SHORT)]})[-1] == (
        "equal: 1 feature in 2 ways of serving, 1 cell n/a"
    )


def test_a_seed_whose_draw_is_a_tie_is_ignored() -> None:
    prompt = CasePrompt((1,), SamplingParams(max_tokens=1, temperature=1.0, seed=7))

    class Ties(Script):
        def decode(self, prompt: Sequence[int], params: SamplingParams) -> list[Decoded]:
            return [Decoded((1,), margin=1e-6 if params.seed < 9 else 1e-3)]

    chosen = settled(FeatureCase("temperature", (prompt, prompt), equal_tokens), cast("Any", Ties()), str)

    assert [one.params.seed for one in chosen.prompts] == [9, 9]
    greedy = FeatureCase("greedy", (ASK,), equal_tokens)
    assert settled(greedy, cast("Any", Ties()), str) is greedy


def test_tokens_without_a_reference_equal_the_combined_ones() -> None:
    case = FeatureCase("choice", (ASK,), reads_as(lambda ids: str(ids[0]), str.isdigit), compared=True)
    columns = {
        "combined": FeatureOutputs({"choice": [CaseOutput({0: [5]})]}),
        "P/D shm": FeatureOutputs({"choice": [CaseOutput({0: [5]}, path="handoff")]}),
        "P/D tcp": FeatureOutputs({"choice": [CaseOutput({0: [6]}, path="handoff")]}),
    }

    cells = judge(case, columns, script())

    assert [cell.verdict for cell in cells] == [EQUAL, EQUAL, WRONG]
    assert cells[2].reason == "prompt 0: [(6,)] in place of the combined instance's [(5,)]"


def test_case_names_are_unique_and_each_case_fits_the_small_pool() -> None:
    vocabulary = Vocabulary(300, (2,), lambda text: tuple(text.encode()), lambda ids: bytes(ids).decode())
    cases = make_cases([(1,) * 20, (2,) * 90], vocabulary, 40)

    assert len({case.name for case in cases}) == len(cases) > 20
    largest = max(
        prompt.params.width * (len(prompt.token_ids) + prompt.params.max_tokens)
        for case in cases
        for prompt in case.prompts
    )
    every = sum(
        prompt.params.width * (len(prompt.token_ids) + prompt.params.max_tokens)
        for case in cases
        for prompt in case.prompts
    )
    assert largest <= small_pool_tokens(cases) < every / 5


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_cases_of_few_tokens_stay_within_their_limit(max_tokens: int) -> None:
    vocabulary = Vocabulary(300, (2,), lambda text: tuple(text.encode()), lambda ids: bytes(ids).decode())

    for case in make_cases([(1,) * 20, (2,) * 90], vocabulary, max_tokens):
        assert all(prompt.params.min_tokens <= prompt.params.max_tokens for prompt in case.prompts), case.name


@pytest.mark.parametrize("text", ["", "x", '{"name": "cat", "size": 3}', '{"name": "fox", "size": 10}', "[1]"])
def test_the_schema_case_refuses_what_its_schema_refuses(text: str) -> None:
    vocabulary = Vocabulary(300, (2,), lambda text: tuple(text.encode()), lambda ids: bytes(ids).decode())
    (case,) = [case for case in make_cases([(1,), (2,)], vocabulary, 4) if case.name == "json schema"]

    assert case.judge(script(), case.prompts[:1], [CaseOutput({0: list(text.encode())})]) is not None
    assert case.judge(script(), case.prompts[:1], [CaseOutput({0: list(b'{"name":"fox","size":9}')})]) is None
