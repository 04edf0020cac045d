"""What a client wants in the answer in addition to the text."""

import sys

from scheduler.api.generation_body import GenerationBody
from scheduler.config import SchedulerOptions
from wire.cheap_dataclass import cheap_dataclass


@cheap_dataclass(frozen=True, slots=True)
class AnswerOptions:
    """`logprobs` and `prompt_logprobs`: how many of the most likely tokens per position, None for no log probabilities.

    `usage`: a stream ends with the token counts; `continuous_usage`: every chunk has them too; `cached_tokens`: they
    include the number of cached prompt tokens; `instances`: the stream ends with the names of those that served it.
    """

    n: int = 1
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    cached_tokens: bool = False
    instances: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_by_number: bool = False
    echoes_prompt: bool = False
    skips_special: bool = True


def read_answer_options(body: GenerationBody, options: SchedulerOptions) -> AnswerOptions:
    """Return the answer options of `body`."""
    in_stream = body.stream_options
    forced = options.enable_force_include_usage
    usage = forced or bool(in_stream and in_stream.include_usage)
    return AnswerOptions(
        n=body.n or 1,
        stream=bool(body.stream),
        usage=usage,
        continuous_usage=forced or (usage and bool(in_stream and in_stream.continuous_usage_stats)),
        cached_tokens=body.counts_cached or options.enable_prompt_tokens_details,
        instances=bool(in_stream and in_stream.include_instances),
        logprobs=sys.maxsize if body.logprob_token_ids else _count(body.num_logprobs),
        prompt_logprobs=_count(body.prompt_logprobs),
        token_ids=bool(body.return_token_ids),
        tokens_by_number=bool(body.return_tokens_as_token_ids or options.return_tokens_as_token_ids),
        echoes_prompt=body.echoes,
        skips_special=body.skip_special_tokens is not False,
    )


def _count(number: int | None) -> int | None:
    return sys.maxsize if number == -1 else number
