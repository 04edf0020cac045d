"""The features of `pdserve verify --features`: the requests of each, and the check of its answers."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdserve.feature_judges import (
    Answers,
    CasePrompt,
    Judge,
    best_of_all,
    equal_cosine,
    equal_logprobs,
    equal_prompt_logprobs,
    equal_tokens,
    equal_vectors,
    reads_as,
)
from pdserve.feature_stops import ends_before_stop
from wire.types import BeamSearch, Pooling, RepetitionDetection, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from engine.reference_decoding import ReferenceDecoder


@dataclass(frozen=True, slots=True)
class FeatureCase:
    """A feature. `turns`: each prompt is sent once the previous one has finished. `stops`: each gets a stop string
    chosen from its own answer.

    `compared`: the judge has no reference tokens, so an answer's tokens are compared with the combined instance's.
    """

    name: str
    prompts: tuple[CasePrompt, ...]
    judge: Judge
    turns: bool = False
    stops: bool = False
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the cases need from a model: vocabulary size, end-of-sequence ids, and conversion between text and ids."""

    size: int
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]


def make_cases(
    prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int, *, with_vectors: bool = True
) -> list[FeatureCase]:
    """Return every feature's cases, each with all `prompts`.

    With these seeds no draw of the default model is near a boundary between tokens (verify_features.settled), and few
    draws of other models are.
    """
    return [
        *_sampling_cases(prompts, vocabulary, max_tokens),
        *_sequence_cases(prompts, vocabulary, max_tokens),
        _stop_case(prompts, vocabulary, max_tokens),
        *_logprob_cases(prompts, vocabulary, max_tokens),
        *_structured_cases(prompts, vocabulary, max_tokens),
        _chat_case(prompts, vocabulary, max_tokens),
        *(_vector_cases(prompts) if with_vectors else []),
    ]


def _sampling_cases(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> list[FeatureCase]:
    greedy: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    drawn: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.9, "seed": 20}
    some = tuple(range(5, min(vocabulary.size, 400), 3))
    words = tuple(word for text in (" the", " a", ".") if (word := vocabulary.encode(text)))
    chosen: dict[str, dict[str, Any]] = {
        "greedy": greedy,
        "temperature, seed": drawn | {"seed": 24},
        "top_k": drawn | {"top_k": 7},
        "top_p": drawn | {"top_p": 0.7},
        "min_p": drawn | {"min_p": 0.1},
        "repetition_penalty": greedy | {"repetition_penalty": 1.3},
        "presence_penalty": greedy | {"presence_penalty": 1.5},
        "frequency_penalty": drawn | {"frequency_penalty": 1.2},
        "logit_bias": greedy | {"logit_bias": tuple((token, 4.0) for token in some[:20])},
        "allowed_token_ids": drawn | {"allowed_token_ids": some},
        "bad_words": greedy | {"bad_words": words},
        "min_tokens, stop_token_ids": drawn | {"stop_token_ids": some, "min_tokens": min(3, max_tokens)},
        "ignore_eos": greedy | {"stop_token_ids": ()},
        "repetition_detection": greedy
        | {
            "allowed_token_ids": some[:2],
            "repetition_detection": RepetitionDetection(max_pattern_size=4, min_pattern_size=1, min_count=6),
        },
    }
    return [
        FeatureCase(name, _case_prompts(prompts, SamplingParams(**values)), equal_tokens)
        for name, values in chosen.items()
    ]


def _sequence_cases(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> list[FeatureCase]:
    drawn: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.7, "seed": 4}
    search = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=2, best_of=4, stop_token_ids=vocabulary.eos_token_ids,
        beam_search=BeamSearch(), logprobs=2,
    )  # fmt: skip
    return [
        FeatureCase("n", _case_prompts(prompts, SamplingParams(n=3, **drawn)), equal_tokens),
        FeatureCase(
            "best_of", _case_prompts(prompts, SamplingParams(n=2, best_of=4, logprobs=0, **drawn)), best_of_all
        ),
        FeatureCase("use_beam_search", _case_prompts(prompts, search), equal_logprobs),
    ]


def _stop_case(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> FeatureCase:
    params = SamplingParams(max_tokens=max(max_tokens, _STOP_ROOM), temperature=0.9, seed=30)
    return FeatureCase("stop strings", _case_prompts(prompts, params), ends_before_stop(vocabulary.decode), stops=True)


def _logprob_cases(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> list[FeatureCase]:
    sampled = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, logprobs=5)
    listed = replace(sampled, logprobs=0, logprob_token_ids=(7, 5, vocabulary.size - 1))
    prompt = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=3)
    given = replace(prompt, prompt_logprobs=0, prompt_logprob_token_ids=((7,), (5, vocabulary.size - 1)))
    return [
        FeatureCase("logprobs", _case_prompts(prompts, sampled), equal_logprobs),
        FeatureCase("logprob_token_ids", _case_prompts(prompts, listed), equal_logprobs),
        FeatureCase("prompt_logprobs, echo", _case_prompts(prompts, prompt), equal_prompt_logprobs),
        FeatureCase("prompt_logprob_token_ids", _case_prompts(prompts, given), equal_prompt_logprobs),
    ]


def _structured_cases(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> list[FeatureCase]:
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "size"],
        "properties": {"name": {"enum": ["fox", "dog"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    }  # fmt: skip
    kinds: dict[str, tuple[StructuredOutput, Callable[[str], bool]]] = {
        "json schema": (StructuredOutput("json", json.dumps(schema), whitespace_pattern=""), _fits_schema),
        "regex": (StructuredOutput("regex", "[a-f]{3}-[0-9]{2}"), lambda text: bool(_CODE.fullmatch(text))),
        "choice": (StructuredOutput("choice", json.dumps(_CHOICES)), _CHOICES.__contains__),
        "grammar (EBNF)": (StructuredOutput("grammar", _EBNF), lambda text: bool(_SUM.fullmatch(text))),
        "grammar (Lark)": (StructuredOutput("grammar", _LARK), lambda text: bool(_SUM.fullmatch(text))),
    }
    return [
        FeatureCase(
            name,
            _case_prompts(prompts, _structured_params(kind, vocabulary)),
            reads_as(vocabulary.decode, good),
            compared=True,
        )
        for name, (kind, good) in kinds.items()
    ]


_STOP_ROOM = 24  # tokens, so that there is enough text to stop in
_TURNS = (64, 112, 160)  # tokens of each turn's prompt
_CHOICES = ("a red fox", "a red foxglove", "a blue bird")  # three tokens or more each, including the end
_CODE = re.compile("[a-f]{3}-[0-9]{2}")
_SUM = re.compile(r"[0-9](\+[0-9]){1,3}")
_EBNF = 'root ::= digit "+" digit more?\nmore ::= "+" digit ("+" digit)?\ndigit ::= [0-9]\n'
_LARK = 'start: DIGIT "+" DIGIT more?\nmore: "+" DIGIT ("+" DIGIT)?\nDIGIT: /[0-9]/\n'


def _structured_params(kind: StructuredOutput, vocabulary: Vocabulary) -> SamplingParams:
    return SamplingParams(
        max_tokens=64, temperature=0.7, seed=9, stop_token_ids=vocabulary.eos_token_ids, structured=kind
    )


def _fits_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != {"name", "size"}:
        return False
    return value["name"] in ("fox", "dog") and isinstance(value["size"], int) and 0 <= value["size"] <= 9


def _chat_case(prompts: Sequence[tuple[int, ...]], vocabulary: Vocabulary, max_tokens: int) -> FeatureCase:
    """A multi-turn chat: each prompt starts with the whole previous one, so that its KV is cached."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    words = [token for prompt in prompts for token in prompt]
    whole = (words * (1 + _TURNS[-1] // len(words)))[: _TURNS[-1]]
    turns = [CasePrompt(tuple(whole[:count]), params) for count in _TURNS]

    def judge(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
        wrong = equal_tokens(decoder, prompts, answers)
        if wrong is None and answers[-1].cached_tokens == 0:
            return "equal, but no token of the last turn's prompt was cached"
        return wrong

    return FeatureCase("prefix cache, turns of a chat", tuple(turns), judge, turns=True)


def _vector_cases(prompts: Sequence[tuple[int, ...]]) -> list[FeatureCase]:
    pooled = {
        "embedding (last)": Pooling(how="last"),
        "embedding (mean)": Pooling(how="mean"),
        "embedding (dimensions)": Pooling(how="last", dimensions=16),
    }
    params = SamplingParams(max_tokens=1)
    return [
        FeatureCase(name, tuple(CasePrompt(prompt, params, pooling) for prompt in prompts), equal_vectors)
        for name, pooling in pooled.items()
    ] + [
        FeatureCase(
            "score (cosine of vectors)",
            tuple(CasePrompt(one, params, Pooling(how="last")) for one in prompts),
            equal_cosine,
        )
    ]


def _case_prompts(prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> tuple[CasePrompt, ...]:
    return tuple(CasePrompt(prompt, params) for prompt in prompts)
