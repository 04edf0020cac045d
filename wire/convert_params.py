"""Sampling parameters, log probabilities, beams and pooling <-> protobuf. check_prompt.py checks the values."""

import dataclasses

from wire import cluster_pb2 as pb
from wire.errors import InvalidRequest
from wire.types import (
    Beam,
    BeamSearch,
    Pooling,
    PromptLogprobs,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)

_PLAIN, _OPTIONAL, _IDS = (
    tuple(field.name for field in dataclasses.fields(SamplingParams) if field.type in kinds)
    for kinds in ((int, float), (int | None,), (tuple[int, ...],))
)
_OPTIONAL_POOLING = ("normalize", "dimensions", "second_text")
_EARLY_STOPPING: dict[bool | str, str] = {True: "true", False: "false", "never": "never"}
_EARLY_STOPPING_NAMED = {name: value for value, name in _EARLY_STOPPING.items()}


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Convert sampling parameters."""
    message = pb.SamplingParams(**{name: getattr(params, name) for name in (*_PLAIN, *_OPTIONAL, *_IDS)})
    message.logit_bias.extend(pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias)
    message.bad_words.extend(pb.Output(token_ids=word) for word in params.bad_words)
    if params.structured is not None:
        message.structured.CopyFrom(_structured_to_pb(params.structured))
    if params.beam_search is not None:
        early = _EARLY_STOPPING[params.beam_search.early_stopping]
        message.beam_search.length_penalty = params.beam_search.length_penalty
        message.beam_search.early_stopping = early
    if params.repetition_detection is not None:
        message.repetition_detection.CopyFrom(pb.RepetitionDetection(**dataclasses.asdict(params.repetition_detection)))
    return message


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Convert sampling parameters. Raises InvalidRequest for an unknown early_stopping."""
    values = {name: getattr(message, name) for name in _PLAIN}
    values |= {name: tuple(getattr(message, name)) for name in _IDS}
    values |= {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL}
    return SamplingParams(
        **values,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        structured=_structured_from_pb(message.structured) if message.HasField("structured") else None,
        beam_search=_beam_search_from_pb(message.beam_search) if message.HasField("beam_search") else None,
        repetition_detection=_repetition_from_pb(message.repetition_detection)
        if message.HasField("repetition_detection")
        else None,
    )


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
    """Convert the log probabilities of part of a prompt; rank 0 stands for None, as ranks count from 1."""
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
    """Convert the pooling options of a prompt."""
    return pb.Pooling(**{name: getattr(pooling, name) for name in ("kind", "how", *_OPTIONAL_POOLING)})


def pooling_from_pb(message: pb.Pooling) -> Pooling:
    """Convert the pooling options of a prompt."""
    values = {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL_POOLING}
    return Pooling(message.kind, message.how, **values)


def _structured_to_pb(structured: StructuredOutput) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        kind=structured.kind, value=structured.value, backend=structured.backend,
        whitespace_pattern=structured.whitespace_pattern,
    )  # fmt: skip


def _structured_from_pb(message: pb.StructuredOutput) -> StructuredOutput:
    whitespace = message.whitespace_pattern if message.HasField("whitespace_pattern") else None
    return StructuredOutput(message.kind, message.value, whitespace, message.backend)


def _repetition_from_pb(message: pb.RepetitionDetection) -> RepetitionDetection:
    return RepetitionDetection(message.max_pattern_size, message.min_pattern_size, message.min_count)


def _beam_search_from_pb(message: pb.BeamSearch) -> BeamSearch:
    if message.early_stopping not in _EARLY_STOPPING_NAMED:
        raise InvalidRequest(
            f"early_stopping is {message.early_stopping[:20]!r}, must be true, false or never", "early_stopping"
        )
    return BeamSearch(message.length_penalty, _EARLY_STOPPING_NAMED[message.early_stopping])
