"""Refuse requests whose answer would exceed --max-answer-bytes in memory, as far as that is known in advance.

The length of an output is not known in advance: scheduler/api/choice_collector.py checks it while the output arrives.
"""

from collections.abc import Sequence

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.generation_body import GenerationBody
from scheduler.config import SchedulerOptions
from wire.errors import InvalidRequest
from wire.types import SamplingParams

_LOGPROB_BYTES = 64  # one token and its log probability as JSON; chat entries are larger, completion entries smaller
_TOKEN_ID_BYTES = 7
_HELD_BYTES = 300  # a token held until best_of selects or, with log probabilities, until the beam search ends


def check_answer(
    body: GenerationBody, params: SamplingParams, prompts: Sequence[Sequence[int]], answer: AnswerOptions,
    options: SchedulerOptions, *, num_echoes: int,
) -> None:  # fmt: skip
    """Raise InvalidRequest if `prompts`, echoed `num_echoes` times, or a prompt's sequences take too many bytes."""
    num_tokens = num_echoes * sum(map(len, prompts))
    if params.prompt_logprobs is not None:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
        _check(name, num_tokens * (1 + params.prompt_logprobs) * _LOGPROB_BYTES, options)
    if answer.token_ids:
        _check("return_token_ids", num_tokens * _TOKEN_ID_BYTES, options)
    describes_beams = params.beam_search is not None and params.logprobs is not None
    if describes_beams or params.num_sequences > params.n:
        num_logprobs = len(params.logprob_token_ids) or params.logprobs or 0
        held = params.width * params.max_tokens * (_HELD_BYTES + _LOGPROB_BYTES * num_logprobs)
        _check(body.num_logprobs_field if describes_beams else "best_of", held, options)


def _check(name: str, num_bytes: int, options: SchedulerOptions) -> None:
    if num_bytes > options.max_answer_bytes:
        raise InvalidRequest(
            f"{name} would need about {num_bytes} bytes, but the limit is {options.max_answer_bytes} "
            "(--max-answer-bytes): request fewer tokens, prompts, choices or log probabilities",
            name,
        )
