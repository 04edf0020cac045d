"""From a checked body to our own types: the limits that need the model, the prompts or the config."""

import secrets
from collections.abc import Sequence

from scheduler.api.generation_body import GenerationBody
from scheduler.api.prompts import check_token_ids
from scheduler.config import SchedulerOptions
from scheduler.pieces import TextOptions
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest, PromptTooLong
from wire.types import SamplingParams

_LEAST_TEMPERATURE = 0.01  # below it logits / temperature overflows; 0 itself is greedy


def read_sampling(
    body: GenerationBody, prompts: Sequence[Sequence[int]], tokens: Tokens, options: SchedulerOptions, *,
    default_max_tokens: int | None, param: str,
) -> SamplingParams:  # fmt: skip
    """Return the parameters; `default_max_tokens` None means all the context left. Raises InvalidRequest."""
    max_tokens = _max_tokens(body.max_output, max(map(len, prompts)), tokens.max_model_len, default_max_tokens, param)
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens {body.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_k = -1 if body.top_k is None or not 0 < body.top_k < tokens.vocab_size else body.top_k
    n = _check_n(body, options, greedy=temperature == 0 or top_k == 1)
    stop_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if stop_ids:
        check_token_ids(stop_ids, tokens, "stop_token_ids")
    seed = draw_seed() if body.seed is None else body.seed % 2**63
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0,
        top_k=top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        n=n,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stop_ids if body.ignore_eos else tuple(dict.fromkeys((*tokens.eos_token_ids, *stop_ids))),
    )


def draw_seed() -> int:
    """Return a seed for a prompt whose client gave none."""
    return secrets.randbits(63)


def read_text_options(
    body: GenerationBody, tokens: Tokens, options: SchedulerOptions, *, continues_prompt: bool
) -> TextOptions:
    """Return how the output becomes text. Raises InvalidRequest."""
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        if body.stream_options.continuous_usage_stats:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats is not supported yet: leave it out", "stream_options"
            )
    return TextOptions(
        stops=_stops(body.stop, options),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        silent_stop_ids=frozenset() if body.ignore_eos else frozenset(tokens.eos_token_ids),
        continues_prompt=continues_prompt,
    )


def _max_tokens(asked: int | None, prompt_len: int, model_len: int, default: int | None, param: str) -> int:
    """Return the limit of output tokens; it fits behind the longest prompt."""
    limit = f"This model's maximum context length is {model_len} tokens"
    left = model_len - prompt_len
    if left < 1:
        raise PromptTooLong(f"{limit}; the prompt has {prompt_len}, and the output needs at least one more", param)
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise PromptTooLong(
            f"{limit}; the prompt has {prompt_len} and max_tokens asks for {asked}, together {prompt_len + asked}",
            "max_tokens",
        )
    return asked


def _check_n(body: GenerationBody, options: SchedulerOptions, *, greedy: bool) -> int:
    n = body.n or 1
    if n > options.max_n:
        raise InvalidRequest(f"n {n} is more than {options.max_n} (--max-n)", "n")
    if n > 1 and greedy:
        raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0 or top_k 1), got {n}", "n")
    if body.best_of is not None and body.best_of != n:
        less = body.best_of < n
        raise InvalidRequest(
            f"best_of {body.best_of} is less than n {n}" if less else "best_of above n is not supported yet", "best_of"
        )
    return n


def _stops(value: object, options: SchedulerOptions) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list):
        raise InvalidRequest("stop must be a text or a list of texts", "stop")
    if len(stops) > options.max_stop_strings:
        raise InvalidRequest(f"stop has {len(stops)} texts; at most {options.max_stop_strings} are allowed", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest("stop must be a text or a list of texts, none empty", "stop")
        if len(stop) > options.max_stop_chars:
            raise InvalidRequest(
                f"a stop text has {len(stop)} characters; at most {options.max_stop_chars} are allowed", "stop"
            )
    return tuple(dict.fromkeys(stops))
