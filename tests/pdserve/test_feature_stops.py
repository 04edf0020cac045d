"""Stop strings of `pdserve verify --features`: a text from the second half of an answer, and no token after it."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.reference_decoding import Decoded
from pdserve.feature_cases import FeatureCase
from pdserve.feature_judges import CaseOutput, CasePrompt
from pdserve.feature_stops import choose_stop, ends_before_stop
from pdserve.verify_features import settled
from wire.errors import ConfigError
from wire.types import SamplingParams

DRAWN = SamplingParams(max_tokens=16, temperature=0.9, seed=3)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Spoken:
    """A reference whose answers are texts, by seed; later seeds get the last one."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> list[Decoded]:
        return [Decoded(ids(self.texts[min(params.seed - DRAWN.seed, len(self.texts) - 1)]))]


def spoken(*texts: str) -> Any:
    return Spoken(*texts)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("abcdefghijklmnop", "i"),
        ("abababababababab", None),  # nothing is new in the second half
        ("aaaaabbbbabbbbbb", "ba"),
        ("abcdefgh\ufffdj\ufffd\ufffdmnop", "j"),
        ("abcdefghabcdmnop", None),  # what is new comes too late
    ],
)
def test_the_stop_string_first_appears_in_the_third_quarter(text: str, stop: str | None) -> None:
    assert choose_stop(ids(text), decode) == stop


def test_the_first_seed_with_a_stop_string_is_used() -> None:
    case = FeatureCase("stop strings", (CasePrompt((1,), DRAWN),), ends_before_stop(decode), stops=True)

    (prompt,) = settled(case, spoken("abababababababab", "abcdefghijklmnop"), decode).prompts

    assert (prompt.params.seed, prompt.stops) == (DRAWN.seed + 1, ("i",))
    with pytest.raises(ConfigError, match="with each of 20 seeds"):
        settled(case, spoken("abababababababab"), decode)


def test_text_and_tokens_must_end_with_the_stop_string() -> None:
    judge, prompts = ends_before_stop(decode), [CasePrompt((1,), DRAWN, stops=("ij",))]
    reference = spoken("abcdefghijklmnop")

    def judged(reported: str, text: str) -> str | None:
        return judge(reference, prompts, [CaseOutput({0: list(ids(reported))}, text=text)])

    assert judged("abcdefghij", "abcdefgh") is None
    assert judged("abcdefghij", "abcdefghij") == "prompt 0: 'abcdefghij' in place of 'abcdefgh'"
    for reported in ("abcdefghi", "abcdefghijk", "abcdefgXij"):
        assert " up to 'ij'" in str(judged(reported, "abcdefgh"))
    assert judge(reference, prompts, [CaseOutput(text="abcdefgh")]) is not None
