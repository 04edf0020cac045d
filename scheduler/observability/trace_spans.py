"""The spans of one request: the request, the stages of its prompts, and its decoding. Pure.

request  |--------------------------------------------------------|
  queue          |--|
  reserve           |-|
  encode              |---|
  prefill                 |------|
  send                           |--|
  first_step                        |--|
  decode                         |-----------------------------|

`queue` to `first_step` are the stages of one prompt: those that it had, one after another from when the request was
dispatched, each with the duration measured where it ran. `encode` is the wait for the embeddings of its images.
`decode` lasts from the request's first token to its last. Only the scheduler's clock determines when a trace begins.
"""

from collections.abc import Callable, Iterator

from scheduler.observability.request_done import RequestDone
from scheduler.request import PromptDone
from telemetry.spans import Attribute, Span, TraceContext, read_context
from wire.types import STAGES

MAX_PROMPTS = 16
_NS = 1_000_000_000


def spans_of(
    done: RequestDone, end_ns: int, context: TraceContext | None, *, model: str, new_id: Callable[[int], bytes]
) -> list[Span]:
    """Return the request's span and its children, for the first MAX_PROMPTS prompts.

    The request's span belongs to the client's trace, if there is one, and has the id that was passed on to workers of
    other engines. `end_ns` is when the request ended, in nanoseconds since 1970; `new_id(n)` returns n random bytes.
    """
    start_ns = end_ns - int(done.seconds * _NS)
    own = read_context(done.request.traceparent)
    request = Span(
        trace_id=own.trace_id if own else context.trace_id if context else new_id(16),
        span_id=own.parent_id if own else new_id(8),
        parent_id=context.parent_id if context else b"",
        name="llm_request",
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_request_attributes(done, model),
        is_server=True,
        error="" if done.outcome != "failed" else done.error or "failed",
        state=context.state if context else "",
    )
    return [request, *(_child_span(request, stage, new_id(8)) for stage in _stage_spans(done, start_ns))]


_Stage = tuple[str, int, int, dict[str, Attribute]]
"""Name, start and end in nanoseconds since 1970, attributes."""


def _child_span(request: Span, stage: _Stage, span_id: bytes) -> Span:
    name, start_ns, end_ns, attributes = stage
    return Span(
        request.trace_id, span_id, request.span_id, name, start_ns, end_ns, attributes, state=request.state
    )  # fmt: skip


def _stage_spans(done: RequestDone, start_ns: int) -> Iterator[_Stage]:
    for prompt in sorted(done.served, key=lambda prompt: prompt.prompt_index)[:MAX_PROMPTS]:
        at_ns = start_ns + int(done.dispatched_s * _NS)
        for name in STAGES:
            seconds = getattr(prompt.times, f"{name}_s")
            if seconds is not None:
                end_ns = at_ns + int(seconds * _NS)
                yield name, at_ns, end_ns, _stage_attributes(name, prompt)
                at_ns = end_ns
    if done.first_token_s is not None and done.last_token_s is not None and done.last_token_s > done.first_token_s:
        first_ns, last_ns = start_ns + int(done.first_token_s * _NS), start_ns + int(done.last_token_s * _NS)
        yield "decode", first_ns, last_ns, {"gen_ai.usage.completion_tokens": done.num_output_tokens}


def _stage_attributes(name: str, prompt: PromptDone) -> dict[str, Attribute]:
    prefill, decode = prompt.prefill_instance or prompt.decode_instance, prompt.decode_instance
    where = {"reserve": decode, "first_step": decode, **dict.fromkeys(("encode", "prefill", "send"), prefill)}.get(name)
    attributes: dict[str, Attribute] = {"pdserve.prompt": prompt.prompt_index}
    if where is not None:
        attributes["pdserve.instance"] = where
    if name == "prefill":
        attributes["pdserve.cached_tokens"] = prompt.times.cached_tokens
    if name == "send":
        attributes |= {
            "pdserve.to_instance": decode or "", "pdserve.transport": prompt.times.transport,
            "pdserve.kv_bytes": prompt.times.kv_bytes, "pdserve.kv_bytes_early": prompt.times.kv_bytes_early,
        }  # fmt: skip
    return attributes


def _request_attributes(done: RequestDone, model: str) -> dict[str, Attribute]:
    """Return the attributes under vLLM's and pdserve's names; never the text of a prompt or an answer."""
    params = done.request.params
    attributes: dict[str, Attribute] = {
        "gen_ai.request.id": done.request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": done.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": done.num_output_tokens,
        "gen_ai.response.finish_reasons": done.reasons,
        "gen_ai.latency.e2e": done.seconds,
        "gen_ai.latency.time_in_queue": done.queue_s,
        "pdserve.ending": done.outcome,
        "pdserve.prompts": len(done.request.prompts),
    }
    return attributes | _phase_attributes(done) | _served_attributes(done)


def _phase_attributes(done: RequestDone) -> dict[str, Attribute]:
    if done.first_token_s is None or done.prefill_s is None or done.decode_s is None:
        return {}
    return {
        "gen_ai.latency.time_to_first_token": done.first_token_s,
        "gen_ai.latency.time_in_model_prefill": done.prefill_s,
        "gen_ai.latency.time_in_model_decode": done.decode_s,
        "gen_ai.latency.time_in_model_inference": done.prefill_s + done.decode_s,
    }


def _served_attributes(done: RequestDone) -> dict[str, Attribute]:
    if not done.served:
        return {}
    return {
        "pdserve.path": tuple(dict.fromkeys(one.path for one in done.served)),
        "pdserve.prefill_instance": tuple(dict.fromkeys(filter(None, (one.prefill_instance for one in done.served)))),
        "pdserve.decode_instance": tuple(dict.fromkeys(filter(None, (one.decode_instance for one in done.served)))),
        "pdserve.cached_tokens": sum(one.times.cached_tokens for one in done.served),
        "pdserve.kv_bytes": sum(one.times.kv_bytes for one in done.served),
        "pdserve.retried_prompts": sum(one.tries > 1 for one in done.served),
    }
