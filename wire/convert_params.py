"""How tokens are chosen and how likely they were <-> protobuf. Malformed input raises InvalidRequest."""

import math

from wire import cluster_pb2 as pb
from wire.errors import InvalidRequest
from wire.types import Beam, BeamSearch, Pooling, PromptLogprobs, SamplingParams, StructuredOutput, TokenLogprobs

MAX_LOGPROBS = 1024  # what an instance computes at most; the HTTP door allows fewer
_PLAIN = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "min_tokens", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids",
)  # fmt: skip
_OPTIONAL_POOLING = ("normalize", "dimensions", "second_text")
POOLING_KINDS = ("embed", "score")
POOLING_HOW = ("last", "mean", "cls")
_OPTIONAL = ("best_of", "logprobs", "prompt_logprobs")
_EARLY_STOPPING: dict[bool | str, str] = {True: "true", False: "false", "never": "never"}
_EARLY_STOPPING_NAMED = {name: value for value, name in _EARLY_STOPPING.items()}


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Convert sampling parameters."""
    message = pb.SamplingParams(**{name: getattr(params, name) for name in (*_PLAIN, *_OPTIONAL)})
    message.logit_bias.extend(pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias)
    message.bad_words.extend(pb.Output(token_ids=word) for word in params.bad_words)
    if params.structured is not None:
        message.structured.CopyFrom(_structured_to_pb(params.structured))
    if params.beam_search is not None:
        early = _EARLY_STOPPING[params.beam_search.early_stopping]
        message.beam_search.length_penalty = params.beam_search.length_penalty
        message.beam_search.early_stopping = early
    return message


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Convert and check what an instance relies on: the same rules as at the HTTP door."""
    values = {name: getattr(message, name) for name in _PLAIN}
    values |= {name: tuple(values[name]) for name in ("stop_token_ids", "allowed_token_ids")}
    values |= {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL}
    params = SamplingParams(
        **values,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        structured=_structured_from_pb(message.structured) if message.HasField("structured") else None,
        beam_search=_beam_search_from_pb(message.beam_search) if message.HasField("beam_search") else None,
    )
    check_params(params)
    return params


def check_params(params: SamplingParams) -> None:
    """Raise InvalidRequest naming the field, its value and the limit. Comparisons fail for NaN."""
    logprobs = f"in [0, {MAX_LOGPROBS}]"
    rules = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, 0.0 <= params.temperature <= 100.0, "in [0, 100]"),
        ("top_k", params.top_k, params.top_k >= -1, "-1 or more"),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "in (0, 1]"),
        ("min_p", params.min_p, 0.0 <= params.min_p <= 1.0, "in [0, 1]"),
        ("n", params.n, 1 <= params.n <= 1024, "in [1, 1024]"),
        ("best_of", params.best_of, params.n <= (params.best_of or params.n) <= 1024, f"in [n = {params.n}, 1024]"),
        ("min_tokens", params.min_tokens, 0 <= params.min_tokens <= params.max_tokens, "in [0, max_tokens]"),
        ("repetition_penalty", params.repetition_penalty, 0.0 < params.repetition_penalty < math.inf, "above 0"),
        ("presence_penalty", params.presence_penalty, -2.0 <= params.presence_penalty <= 2.0, "in [-2, 2]"),
        ("frequency_penalty", params.frequency_penalty, -2.0 <= params.frequency_penalty <= 2.0, "in [-2, 2]"),
        ("logprobs", params.logprobs, 0 <= (params.logprobs or 0) <= MAX_LOGPROBS, logprobs),
        ("prompt_logprobs", params.prompt_logprobs, 0 <= (params.prompt_logprobs or 0) <= MAX_LOGPROBS, logprobs),
        ("bad_words", params.bad_words, all(params.bad_words), "words of at least one token"),
    )
    for name, value, good, limit in rules:
        if not good:
            raise InvalidRequest(f"{name} is {value}, must be {limit}", param=name)
    for token_id, bias in params.logit_bias:
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, must be in [-100, 100]", "logit_bias")
    if params.beam_search is not None:
        _check_beams(params, params.beam_search)


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Convert one position's log probabilities."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob, rank=logprobs.rank, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Convert one position's log probabilities."""
    return TokenLogprobs(message.logprob, message.rank, tuple(message.top_ids), tuple(message.top_logprobs))


def prompt_logprobs_to_pb(part: PromptLogprobs) -> pb.PromptLogprobs:
    """Convert the log probabilities of a part of a prompt."""
    tokens = [pb.TokenLogprobs() if token is None else logprobs_to_pb(token) for token in part.tokens]
    return pb.PromptLogprobs(prompt_id=part.prompt_id, start=part.start, tokens=tokens)


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Convert the log probabilities of a part of a prompt; ranks count from 1, so one without has none."""
    tokens = tuple(logprobs_from_pb(token) if token.rank else None for token in message.tokens)
    return PromptLogprobs(message.prompt_id, message.start, tokens)


def beam_to_pb(beam: Beam) -> pb.Beam:
    """Convert a hypothesis."""
    return pb.Beam(token_ids=beam.token_ids, score=beam.score, done=beam.done, stop_token_id=beam.stop_token_id)


def beam_from_pb(message: pb.Beam) -> Beam:
    """Convert a hypothesis."""
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    return Beam(tuple(message.token_ids), message.score, message.done, stop)


def pooling_to_pb(pooling: Pooling) -> pb.Pooling:
    """Convert what is wanted of a prompt in place of text."""
    return pb.Pooling(**{name: getattr(pooling, name) for name in ("kind", "how", *_OPTIONAL_POOLING)})


def pooling_from_pb(message: pb.Pooling, num_tokens: int) -> Pooling:
    """Convert and check it. `num_tokens` are the prompt's."""
    values = {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL_POOLING}
    pooling = Pooling(message.kind, message.how, **values)
    dimensions, second = pooling.dimensions, pooling.second_text
    rules = (
        ("kind", pooling.kind, pooling.kind in POOLING_KINDS, f"one of {', '.join(POOLING_KINDS)}"),
        ("how", pooling.how, pooling.how in ("", *POOLING_HOW), f"empty or one of {', '.join(POOLING_HOW)}"),
        ("dimensions", dimensions, dimensions is None or dimensions >= 1, "at least 1"),
        ("second_text", second, second is None or 0 < second < num_tokens, f"a token after the first of {num_tokens}"),
    )
    for name, value, good, limit in rules:
        if not good:
            raise InvalidRequest(f"{name} is {str(value)[:40]!r}, must be {limit}", param=name)
    return pooling


def _check_beams(params: SamplingParams, search: BeamSearch) -> None:
    rules = (
        ("best_of", params.num_beams, params.num_beams >= 2, "at least 2 with beam search"),
        ("temperature", params.temperature, params.temperature == 0.0, "0 with beam search"),
        ("top_p", params.top_p, params.top_p == 1.0, "1 with beam search"),
        ("top_k", params.top_k, params.top_k == -1, "-1 with beam search"),
        ("min_p", params.min_p, params.min_p == 0.0, "0 with beam search"),
        ("structured", "set", params.structured is None, "unset with beam search"),
        ("logprobs", params.logprobs, params.logprobs is None, "unset with beam search"),
        ("length_penalty", search.length_penalty, abs(search.length_penalty) <= 100.0, "in [-100, 100]"),
    )
    for name, value, good, limit in rules:
        if not good:
            raise InvalidRequest(f"{name} is {value}, must be {limit}", param=name)


def _structured_to_pb(structured: StructuredOutput) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        kind=structured.kind, value=structured.value, backend=structured.backend,
        whitespace_pattern=structured.whitespace_pattern,
    )  # fmt: skip


def _structured_from_pb(message: pb.StructuredOutput) -> StructuredOutput:
    whitespace = message.whitespace_pattern if message.HasField("whitespace_pattern") else None
    return StructuredOutput(message.kind, message.value, whitespace, message.backend)


def _beam_search_from_pb(message: pb.BeamSearch) -> BeamSearch:
    if message.early_stopping not in _EARLY_STOPPING_NAMED:
        raise InvalidRequest(
            f"early_stopping is {message.early_stopping[:20]!r}, must be true, false or never", "early_stopping"
        )
    return BeamSearch(message.length_penalty, _EARLY_STOPPING_NAMED[message.early_stopping])
