"""Check the prompts that instances receive: the same rules over gRPC, in process and in a commit. Pure."""

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter

from wire.errors import InvalidGrammar, InvalidRequest
from wire.parameter_rules import MAX_BEAM_LOGPROBS, MAX_BIAS, MAX_COUNT, MAX_SCORED_TOKENS, Bounds, rules_of
from wire.prompt_images import check_images
from wire.types import (
    WITH_BEAMS,
    BeamSearch,
    Pooling,
    PromptState,
    RepetitionDetection,
    ResumableStream,
    SamplingParams,
    StructuredOutput,
    Thinking,
)

MAX_PATTERN_SIZE = 1024  # compared at every token
MAX_BAD_WORD_TOKENS = 64
MAX_SALT = 128
MAX_GRAMMAR_BYTES = 64 * 2**10
MAX_STREAM_REQUEST = 2**20
POOLING_KINDS = ("embed", "classify", "token_embed", "token_classify")
POOLING_HOW = ("last", "mean", "cls")

_STREAM_ID = re.compile("[0-9a-f]{32}")
_Rule = tuple[str, object, bool, str]  # a field, its value, whether that is valid, and what it must be
_RULES, _BEAM_RULES = rules_of(SamplingParams), rules_of(BeamSearch)
_values = attrgetter(*_RULES)


def check_prompt(state: PromptState) -> None:
    """Raise InvalidRequest for a prompt that no instance can run; outputs must be given for none or all sequences."""
    check_params(state.params)
    if state.pooling is not None:
        _check_pooling(state.pooling, len(state.token_ids))
    if not state.token_ids:
        raise InvalidRequest("a prompt needs at least one token", param="prompt")
    check_ids("prompt", state.token_ids)
    num_lists, num_scored = len(state.params.prompt_logprob_token_ids), len(state.token_ids) - 1
    if num_lists > num_scored:
        raise InvalidRequest(
            f"prompt_logprob_token_ids has {num_lists} lists, but the limit is the prompt's length - 1 = {num_scored}",
            "prompt_logprob_token_ids",
        )
    if len(state.cache_salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt has {len(state.cache_salt)} characters, but the limit is {MAX_SALT}")
    if not state.gap_limit_s >= 0:
        raise InvalidRequest(f"gap_limit_s is {state.gap_limit_s}, but must be at least 0")
    if state.outputs and len(state.outputs) != state.params.num_sequences:
        limit = f"but must be that of sequences, {state.params.num_sequences}"
        raise InvalidRequest(f"the number of outputs is {len(state.outputs)}, {limit}")
    if state.images:
        check_images(state)
    if state.stream is not None:
        _check_stream(state, state.stream)
    if state.beams and state.params.beam_search is None:
        raise InvalidRequest("beams is set, but must be empty without beam search")


def check_params(params: SamplingParams) -> None:
    """Raise InvalidRequest naming the field, its value and the limit. Comparisons fail for NaN."""
    for (name, rule), value in zip(_RULES.items(), _values(params), strict=True):
        if value != rule.default:
            _check_bounds(name, value, rule.instance)
    n, best_of = params.n, params.best_of
    _refuse((
        ("best_of", best_of, best_of is None or best_of >= n, f"at least n = {n}"),
        ("min_tokens", params.min_tokens, params.min_tokens <= params.max_tokens, "in [0, max_tokens]"),
    ))  # fmt: skip
    _check_ids_of(params)
    for token_id, bias in params.logit_bias:
        if not abs(bias) <= MAX_BIAS:
            limit = f"but must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}]"
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, {limit}", "logit_bias")
    if params.logprob_token_ids and params.logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs: leave it out, or set logprobs", "logprob_token_ids")
    if params.prompt_logprob_token_ids and params.prompt_logprobs != 0:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}, but must be 0 with prompt_logprob_token_ids",
            "prompt_logprobs",
        )
    if params.repetition_detection is not None:
        check_repetition(params.repetition_detection)
    if params.beam_search is not None:
        _check_beams(params, params.beam_search)
    if params.structured is not None:
        _check_structured(params.structured)
    if params.thinking is not None:
        _check_thinking(params.thinking)


def check_seed(seed: int) -> None:
    """Raise InvalidRequest for a seed out of range."""
    _check_bounds("seed", seed, _RULES["seed"].instance)


def check_repetition(rule: RepetitionDetection) -> None:
    """Raise InvalidRequest for a rule that is out of range or can never match."""
    maximum, minimum = rule.max_pattern_size, rule.min_pattern_size
    name = "repetition_detection"
    _refuse((
        (f"{name}.max_pattern_size", maximum, 1 <= maximum <= MAX_PATTERN_SIZE, f"in [0, {MAX_PATTERN_SIZE}]"),
        (f"{name}.min_pattern_size", minimum, 1 <= minimum <= maximum, f"in [0, max_pattern_size = {maximum}]"),
        (f"{name}.min_count", rule.min_count, 2 <= rule.min_count <= MAX_COUNT, f"in [2, {MAX_COUNT}]"),
    ))  # fmt: skip


def check_ids(name: str, token_ids: Sequence[int]) -> None:
    """Raise InvalidRequest with the first id that does not fit a message; the engine checks the vocabulary."""
    for bad in (min(token_ids), max(token_ids)) if token_ids else ():
        if abs(bad) > MAX_COUNT:
            limit = f"but each must be in [{-MAX_COUNT}, {MAX_COUNT}]"
            raise InvalidRequest(f"{name} has token id {bad}, {limit}", name)


def _check_bounds(name: str, value: float | tuple[object, ...] | None, bounds: Bounds) -> None:
    """Refuse a number out of bounds, and a list that would take long to walk at every token."""
    if isinstance(value, tuple):
        if not bounds.allow(len(value)):
            raise InvalidRequest(f"{name} has {len(value)} entries, but the limit is {bounds.maximum}", name)
    elif value is not None and not bounds.allow(value):
        raise InvalidRequest(f"{name} is {value}, but must be {bounds}", name)


def _check_ids_of(params: SamplingParams) -> None:
    for word in params.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            limit = f"but each must have 1 to {MAX_BAD_WORD_TOKENS}"
            raise InvalidRequest(f"bad_words has a word of {len(word)} tokens, {limit}", "bad_words")
        check_ids("bad_words", word)
    check_ids("stop_token_ids", params.stop_token_ids)
    check_ids("allowed_token_ids", params.allowed_token_ids)
    check_ids("logprob_token_ids", params.logprob_token_ids)
    num_scored = sum(map(len, params.prompt_logprob_token_ids))
    if num_scored > MAX_SCORED_TOKENS:
        limit = f"but the limit is {MAX_SCORED_TOKENS}"
        raise InvalidRequest(f"prompt_logprob_token_ids has {num_scored} ids, {limit}", "prompt_logprob_token_ids")
    for ids in params.prompt_logprob_token_ids:
        check_ids("prompt_logprob_token_ids", ids)
    check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])


def _check_structured(output: StructuredOutput) -> None:
    """Refuse, by size alone, a grammar that would not compile or would exceed a message."""
    given = (
        (output.kind[:40], output.value),
        ("whitespace_pattern", output.whitespace_pattern or ""),
        ("guided_decoding_backend", output.backend),
        ("kind", output.kind),
    )
    for name, text in given:
        size = len(text.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"{name} has {size} bytes, but the limit is {MAX_GRAMMAR_BYTES}")


def _check_thinking(thinking: Thinking) -> None:
    start, end, budget = thinking.start_token_id, thinking.end_token_id, thinking.budget
    check_ids("thinking", (start, end))
    _refuse((
        ("thinking_token_budget", budget, budget is None or 0 <= budget <= MAX_COUNT, f"in [0, {MAX_COUNT}]"),
        ("the end of the thinking", end, start >= 0 and end >= 0 and start != end,
         f"0 or more, like its start ({start}), and another token"),
        ("num_before", thinking.num_before, 0 <= thinking.num_before <= MAX_COUNT, f"in [0, {MAX_COUNT}]"),
    ))  # fmt: skip


def _check_beams(params: SamplingParams, search: BeamSearch) -> None:
    early = search.early_stopping
    given = ((name, getattr(params, name), off) for name, off in WITH_BEAMS.items())
    for name, rule in _BEAM_RULES.items():
        _check_bounds(name, getattr(search, name), rule.instance)
    _refuse((
        ("best_of", params.num_beams, params.num_beams >= 2, "at least 2 with beam search"),
        *((name, value, value == off, f"{off} with beam search") for name, value, off in given),
        ("structured", "set", params.structured is None, "unset with beam search"),
        ("thinking_token_budget", "set", params.thinking is None, "unset with beam search"),
        (
            "logprobs", params.logprobs, (params.logprobs or 0) <= MAX_BEAM_LOGPROBS,
            f"at most {MAX_BEAM_LOGPROBS} with beam search",
        ),
        ("repetition_detection", "set", params.repetition_detection is None, "unset with beam search"),
        ("early_stopping", repr(early)[:20], isinstance(early, bool) or early == "never", "true, false or never"),
    ))  # fmt: skip


def _check_stream(state: PromptState, stream: ResumableStream) -> None:
    is_one = state.params.num_sequences == 1 and state.params.beam_search is None
    _refuse((
        ("stream_id", repr(stream.stream_id[:40]), _STREAM_ID.fullmatch(stream.stream_id) is not None, "32 hex digits"),
        ("tenant", f"of {len(stream.tenant)} characters", len(stream.tenant) <= MAX_SALT, f"of at most {MAX_SALT}"),
        ("request", f"of {len(stream.request)} bytes", len(stream.request) <= MAX_STREAM_REQUEST,
         f"of at most {MAX_STREAM_REQUEST}"),
        ("stream", "set", is_one and state.pooling is None and not state.images,
         "unset with several sequences, beam search, pooling or images"),
    ))  # fmt: skip


def _check_pooling(pooling: Pooling, num_tokens: int) -> None:
    dimensions, second = pooling.dimensions, pooling.second_text
    how = f"empty or one of {', '.join(POOLING_HOW)}"
    _refuse((
        ("kind", repr(pooling.kind)[:40], pooling.kind in POOLING_KINDS, f"one of {', '.join(POOLING_KINDS)}"),
        ("how", repr(pooling.how)[:40], pooling.how in ("", *POOLING_HOW), how),
        ("dimensions", dimensions, dimensions is None or dimensions >= 1, "at least 1"),
        ("second_text", second, second is None or 0 < second < num_tokens, f"1 or more and less than {num_tokens}"),
    ))  # fmt: skip


def _refuse(rules: Iterable[_Rule]) -> None:
    for name, value, good, limit in rules:
        if not good:
            raise InvalidRequest(f"{name} is {value}, but must be {limit}", param=name)
