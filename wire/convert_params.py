"""Sampling parameters, log probabilities, beams and pooling <-> protobuf. check_prompt.py checks the values."""

from wire import cluster_pb2 as pb
from wire.errors import InvalidRequest
from wire.plain_message import PlainMessage
from wire.types import (
    Beam,
    BeamSearch,
    Pooling,
    PromptLogprobs,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    Thinking,
    TokenLogprobs,
)

_PARAMS = PlainMessage(SamplingParams, pb.SamplingParams)
_STRUCTURED = PlainMessage(StructuredOutput, pb.StructuredOutput)
_THINKING = PlainMessage(Thinking, pb.Thinking)
_REPETITION = PlainMessage(RepetitionDetection, pb.RepetitionDetection)
_BEAM_SEARCH = PlainMessage(BeamSearch, pb.BeamSearch)
_BEAM = PlainMessage(Beam, pb.Beam)
POOLING = PlainMessage(Pooling, pb.Pooling)
_EARLY_STOPPING: dict[bool | str, str] = {True: "true", False: "false", "never": "never"}
_EARLY_STOPPING_NAMED = {name: value for value, name in _EARLY_STOPPING.items()}


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Convert sampling parameters."""
    structured, search, repetition = params.structured, params.beam_search, params.repetition_detection
    thinking = params.thinking
    return _PARAMS.to_pb(
        params,
        logit_bias=[pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        bad_words=[pb.Output(token_ids=word) for word in params.bad_words],
        prompt_logprob_token_ids=[pb.Output(token_ids=ids) for ids in params.prompt_logprob_token_ids],
        structured=None if structured is None else _STRUCTURED.to_pb(structured),
        beam_search=None if search is None else _beam_search_to_pb(search),
        repetition_detection=None if repetition is None else _REPETITION.to_pb(repetition),
        thinking=None if thinking is None else _THINKING.to_pb(thinking),
    )


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Convert sampling parameters. Raises InvalidRequest for an unknown early_stopping."""
    has = message.HasField
    return _PARAMS.from_pb(
        message,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        prompt_logprob_token_ids=tuple(tuple(ids.token_ids) for ids in message.prompt_logprob_token_ids),
        structured=_STRUCTURED.from_pb(message.structured) if has("structured") else None,
        beam_search=_beam_search_from_pb(message.beam_search) if has("beam_search") else None,
        repetition_detection=_REPETITION.from_pb(message.repetition_detection) if has("repetition_detection") else None,
        thinking=_THINKING.from_pb(message.thinking) if has("thinking") else None,
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Convert one position's log probabilities."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob, rank=logprobs.rank, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Convert one position's log probabilities."""
    return TokenLogprobs(message.logprob, message.rank, tuple(message.top_ids), tuple(message.top_logprobs))


def beam_to_pb(beam: Beam) -> pb.Beam:
    """Convert a hypothesis of a beam search."""
    return _BEAM.to_pb(beam, logprobs=map(logprobs_to_pb, beam.logprobs))


def beam_from_pb(message: pb.Beam) -> Beam:
    """Convert a hypothesis of a beam search."""
    return _BEAM.from_pb(message, logprobs=tuple(map(logprobs_from_pb, message.logprobs)))


def prompt_logprobs_to_pb(part: PromptLogprobs) -> pb.PromptLogprobs:
    """Convert the log probabilities of a part of a prompt."""
    tokens = [pb.TokenLogprobs() if token is None else logprobs_to_pb(token) for token in part.tokens]
    return pb.PromptLogprobs(prompt_id=part.prompt_id, start=part.start, tokens=tokens)


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Convert the log probabilities of part of a prompt; rank 0 stands for None, as ranks count from 1."""
    tokens = tuple(logprobs_from_pb(token) if token.rank else None for token in message.tokens)
    return PromptLogprobs(message.prompt_id, message.start, tokens)


def _beam_search_to_pb(search: BeamSearch) -> pb.BeamSearch:
    return _BEAM_SEARCH.to_pb(search, early_stopping=_EARLY_STOPPING[search.early_stopping])


def _beam_search_from_pb(message: pb.BeamSearch) -> BeamSearch:
    if message.early_stopping not in _EARLY_STOPPING_NAMED:
        raise InvalidRequest(
            f"early_stopping is {message.early_stopping[:20]!r}, but must be true, false or never", "early_stopping"
        )
    return _BEAM_SEARCH.from_pb(message, early_stopping=_EARLY_STOPPING_NAMED[message.early_stopping])
