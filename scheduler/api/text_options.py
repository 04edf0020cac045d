"""How the output becomes text: stop strings, special tokens, and limits on streaming."""

from typing import Any

from scheduler.api.generation_body import GenerationBody
from scheduler.config import SchedulerOptions
from scheduler.text.pieces import TextOptions
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest


def read_text_options(
    body: GenerationBody, tokens: Tokens, options: SchedulerOptions, *, continues_prompt: bool
) -> TextOptions:
    """Return the text options. Raises InvalidRequest."""
    _check_stream(body)
    return TextOptions(
        stops=_stop_strings(body, options),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        silent_stop_ids=frozenset() if body.ignore_eos else frozenset(tokens.eos_token_ids),
        continues_prompt=continues_prompt,
        prompt_only=body.max_output == 0,
    )


def _check_stream(body: GenerationBody) -> None:
    """Raise InvalidRequest for options that need a stream, or that a stream cannot deliver."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    if body.stream and body.use_beam_search:
        raise InvalidRequest("use_beam_search cannot be streamed: its texts are known only at the end", "stream")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed: leave stream out", "prompt_logprobs")


def _stop_strings(body: GenerationBody, options: SchedulerOptions) -> tuple[str, ...]:
    value: Any = body.stop
    stops, name = [value] if isinstance(value, str) else value if value is not None else [], body.stop_field
    if not isinstance(stops, list):
        raise InvalidRequest(f"{name} must be a string or a list of strings", name)
    if len(stops) > options.max_stop_strings:
        raise InvalidRequest(
            f"{name} has {len(stops)} strings, but the limit is {options.max_stop_strings} (--max-stop-strings)",
            name,
        )
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(f"{name} must be a string or a list of strings, none empty", name)
        if len(stop) > options.max_stop_chars:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters, but the limit is {options.max_stop_chars} "
                "(--max-stop-chars)",
                name,
            )
    return tuple(dict.fromkeys(stops))
