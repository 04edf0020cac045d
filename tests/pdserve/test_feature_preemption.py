"""Cells "after preemption" are equal only if each prompt was preempted in that way between two of its tokens."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from pdserve.feature_cases import FeatureCase
from pdserve.feature_judges import CaseOutput, CasePrompt
from pdserve.feature_preemption import FLAGS, REBUILD, SHORT, SWAP, VECTOR, environment_of
from pdserve.feature_runs import FeatureOutputs
from pdserve.verify_features import EQUAL, MEANINGLESS, WRONG, Cell, judge
from processes.failpoints import VARIABLE, Failpoints
from wire.types import Pooling, SamplingParams

PARAMS = SamplingParams(max_tokens=9, temperature=0.0)


def judged(*answers: CaseOutput, params: SamplingParams = PARAMS, pooling: Pooling | None = None) -> list[Cell]:
    """Return the cells of swap and of rebuild, of a feature whose tokens are right."""

    def right(decoder: Any, prompts: Sequence[CasePrompt], answers: Sequence[CaseOutput]) -> str | None:
        return None

    case = FeatureCase("a feature", tuple(CasePrompt((1,), params, pooling) for _ in answers), right)
    return judge(
        case, {way: FeatureOutputs({case.name: list(answers)}, preemptions=9) for way in FLAGS}, cast("Any", None)
    )


def test_each_way_must_have_preempted_each_prompt() -> None:
    both = CaseOutput({0: [5, 6, 7]}, num_swaps=1, num_rebuilds=2)

    assert judged(both, both) == [Cell(EQUAL), Cell(EQUAL)]
    assert judged(both, CaseOutput({0: [5, 6, 7]}, num_swaps=1)) == [
        Cell(EQUAL), Cell(WRONG, "prompt 1 was never preempted between two of its 3 tokens")
    ]  # fmt: skip
    assert judged(CaseOutput({0: [5], 1: [5, 6]}, num_rebuilds=1), both) == [
        Cell(WRONG, "prompt 0 was never preempted between two of its 2 tokens"), Cell(EQUAL)
    ]  # fmt: skip


def test_preemptions_of_other_prompts_do_not_count() -> None:
    assert [cell.verdict for cell in judged(CaseOutput({0: [5, 6, 7]}))] == [WRONG, WRONG]


def test_cases_without_two_tokens_are_left_out_with_the_reason() -> None:
    vector = CaseOutput(vector=(1.0,))

    assert judged(vector, pooling=Pooling()) == [Cell(MEANINGLESS, VECTOR)] * 2
    assert judged(CaseOutput({0: [5]}), params=SamplingParams(max_tokens=1)) == [Cell(MEANINGLESS, SHORT)] * 2


@pytest.mark.parametrize(("max_tokens", "after"), [(1, 1), (2, 1), (3, 2), (32, 2)])
def test_prompts_are_preempted_before_their_last_token(max_tokens: int, after: int) -> None:
    assert Failpoints.parse(environment_of(max_tokens)[VARIABLE]).preempt_after == after


def test_swap_keeps_copies_and_rebuild_has_no_room_for_any() -> None:
    assert FLAGS == {SWAP: (), REBUILD: ("--swap-bytes", "0")}
