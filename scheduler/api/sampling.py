"""From a checked body to SamplingParams: the limits that depend on the model, the prompts or the config."""

import secrets
from collections.abc import Sequence

from scheduler.api.beams import read_beam_search
from scheduler.api.generation_body import GenerationBody
from scheduler.api.prompts import check_token_ids
from scheduler.api.structured import Constraint
from scheduler.api.token_rules import read_allowed, read_bad_words, read_logit_bias
from scheduler.app_context import AppContext
from scheduler.config import SchedulerOptions
from scheduler.tokens import Tokens
from wire.check_prompt import check_repetition
from wire.errors import InvalidRequest, PromptTooLong
from wire.types import PARAMETERS, WITH_BEAMS, RepetitionDetection, SamplingParams

_MIN_TEMPERATURE = 0.01  # below it logits / temperature overflows; 0 is greedy
_ALL = -1
_COMPUTED = frozenset((
    "max_tokens", "temperature", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "length_penalty",
))  # fmt: skip
_AS_GIVEN = {
    name: rule.default
    for name, rule in PARAMETERS.items()
    if rule.kind in (int, float, int | None) and name not in _COMPUTED
}
"""The defaults of the numeric parameters that are used exactly as given."""


async def read_sampling(
    context: AppContext, body: GenerationBody, prompts: Sequence[Sequence[int]], constraint: Constraint | None, *,
    default_max_tokens: int | None, param: str,
) -> SamplingParams:  # fmt: skip
    """Return the parameters; `default_max_tokens` None means the rest of the context. Raises InvalidRequest."""
    options, tokens, longest = context.config.options, context.tokens, max(map(len, prompts))
    beams = read_beam_search(body)
    defaults = context.defaults if beams is None else {**context.defaults, **WITH_BEAMS}
    temperature = defaults["temperature"] if body.temperature is None else body.temperature
    top_k = defaults["top_k"] if body.top_k is None else body.top_k
    top_k = top_k if 0 < top_k < tokens.vocab_size else -1
    n = _check_n(body, options, greedy=beams is None and (temperature == 0 or top_k == 1))
    max_tokens = _max_tokens(context, body, longest, default_max_tokens, param)
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens {body.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    if constraint is not None and beams is not None:
        raise InvalidRequest(f"{constraint[0]} conflicts with use_beam_search: leave one out", "use_beam_search")
    logprobs = _num_logprobs(body.num_logprobs_field, body.num_logprobs, context)
    given = {
        name: defaults.get(name, default) if (value := getattr(body, name)) is None else value
        for name, default in _AS_GIVEN.items()
    }
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        temperature=max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
        top_k=top_k,
        seed=draw_seed() if body.seed is None else body.seed % 2**63,
        n=n,
        stop_token_ids=_stop_ids(body, tokens),
        logit_bias=read_logit_bias(body.logit_bias, tokens),
        allowed_token_ids=read_allowed(body.allowed_token_ids, tokens),
        bad_words=await read_bad_words(body.bad_words, tokens),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body, logprobs, context),
        structured=None if constraint is None else constraint[1],
        beam_search=beams,
        logprob_token_ids=_logprob_ids(body, tokens),
        repetition_detection=_repetition_detection(body),
    )


def draw_seed() -> int:
    """Return a random seed for a prompt whose client gave none."""
    return secrets.randbits(63)


def _max_tokens(context: AppContext, body: GenerationBody, prompt_len: int, default: int | None, param: str) -> int:
    """Return the limit on output tokens, reduced to what fits after the longest prompt; at least 1."""
    model_len = context.tokens.max_model_len
    limit = f"This model's maximum context length is {model_len} tokens"
    left = model_len - prompt_len
    if left < 1:
        raise PromptTooLong(f"{limit}; the prompt has {prompt_len}, and the output needs at least one more", param)
    requested, name = body.max_output, body.max_output_field
    if requested is None:
        default = context.defaults.get("max_tokens", default)
        return left if default is None else min(default, left)
    if requested == 0 and not (body.echoes or body.prompt_logprobs is not None):
        raise InvalidRequest(f"{name} is 0, but must be 1 or more; 0 needs echo or prompt_logprobs", name)
    if requested > model_len:
        raise InvalidRequest(
            f"{name} is {requested}; this model's maximum context length is {model_len} tokens, prompt and output", name
        )
    return min(max(requested, 1), left)


def _check_n(body: GenerationBody, options: SchedulerOptions, *, greedy: bool) -> int:
    n, best_of = body.n or 1, body.best_of
    for name, value in (("n", n), ("best_of", best_of or 1)):
        if value > options.max_n:
            raise InvalidRequest(f"{name} {value} is more than {options.max_n} (--max-n)", name)
    if n > 1 and greedy:
        raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0 or top_k 1), got {n}", "n")
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of {best_of} is less than n {n}", "best_of")
    if best_of is not None and best_of > 1 and greedy:
        raise InvalidRequest(
            f"best_of must be 1 when using greedy sampling (temperature 0 or top_k 1), got {best_of}", "best_of"
        )
    return n


def _stop_ids(body: GenerationBody, tokens: Tokens) -> tuple[int, ...]:
    given = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if given:
        check_token_ids(given, tokens, "stop_token_ids")
    return given if body.ignore_eos else tuple(dict.fromkeys((*tokens.eos_token_ids, *given)))


def _logprob_ids(body: GenerationBody, tokens: Tokens) -> tuple[int, ...]:
    """Return the tokens whose log probabilities replace those of the most likely tokens."""
    given = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    if not given:
        return ()
    check_token_ids(given, tokens, "logprob_token_ids")
    if body.num_logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
    if body.echoes and body.prompt_logprobs is None:
        raise InvalidRequest("logprob_token_ids apply to the output only: leave echo out", "logprob_token_ids")
    return given


def _repetition_detection(body: GenerationBody) -> RepetitionDetection | None:
    given = body.repetition_detection
    if given is None or given.max_pattern_size == 0:
        return None
    rule = RepetitionDetection(given.max_pattern_size, given.min_pattern_size or 1, given.min_count)
    check_repetition(rule)
    return rule


def _prompt_logprobs(body: GenerationBody, logprobs: int | None, context: AppContext) -> int | None:
    """Return how many log probabilities a prompt token gets; if echoed, at least as many as an output token."""
    requested = _num_logprobs("prompt_logprobs", body.prompt_logprobs, context)
    echoed = logprobs if body.echoes else None
    return max((requested, echoed), key=lambda count: -1 if count is None else count)


def _num_logprobs(name: str, requested: int | None, context: AppContext) -> int | None:
    """Return how many log probabilities to return; -1 is the whole vocabulary, if --max-logprobs allows it."""
    maximum = context.config.options.max_logprobs
    if requested is None:
        return None
    vocab_size = context.tokens.vocab_size
    if requested == _ALL and maximum != _ALL and maximum < vocab_size:
        raise InvalidRequest(f"{name} is -1 (all), but must be in [0, {maximum}]; --max-logprobs -1 allows it", name)
    count = vocab_size if requested == _ALL else requested
    if maximum != _ALL and count > maximum:
        raise InvalidRequest(f"{name} is {count}, but must be in [0, {maximum}] (--max-logprobs)", name)
    return min(count, vocab_size)
