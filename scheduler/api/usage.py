"""Token counts, stage times and sent KV bytes of one request, as its client sees them."""

from collections.abc import Sequence
from typing import Any

from scheduler.observability.request_done import RequestDone
from scheduler.request import PromptDone
from scheduler.text_output import TextOutput
from wire.types import STAGES, StageTimes


def token_usage(output: TextOutput, *, details: bool = False) -> dict[str, Any]:
    """Return OpenAI's token counts; with `details` also how many prompt tokens were cached, known only at the end.

    `created_cache_tokens`, vLLM's name, are those added to the prefix cache, without the cached ones that a
    recomputation or a retry added again.
    """
    num_prompt, num_output = output.num_prompt_tokens, output.num_output_tokens
    cached = sum(done.times.cached_tokens for done in output.served)
    created = min(sum(done.times.written_tokens for done in output.served), max(num_prompt - cached, 0))
    of_cache = {"cached_tokens": cached, "created_cache_tokens": created}
    counts = _token_counts(num_prompt, num_output, of_cache if details else None)
    return counts | _completion_details(output.num_reasoning_tokens)


def usage_at_start(output: TextOutput) -> dict[str, Any]:
    """Return the token counts before the first output token."""
    reasons = output.num_reasoning_tokens is not None
    return _token_counts(output.num_prompt_tokens, 0) | _completion_details(0 if reasons else None)


def input_usage(num_tokens: int) -> dict[str, Any]:
    """Return the token counts of inputs that are not continued."""
    return _token_counts(num_tokens, 0)


def _completion_details(num_reasoning: int | None) -> dict[str, Any]:
    return {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}


def _token_counts(num_prompt: int, num_output: int, details: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt, "total_tokens": num_prompt + num_output, "completion_tokens": num_output,
        "prompt_tokens_details": details,
    }  # fmt: skip


def served_headers(served: Sequence[PromptDone]) -> dict[str, str]:
    """Return the headers of an answer about how it was served: the different paths of its prompts, and the timing."""
    if not served:
        return {}
    return {
        "x-pdserve-path": ", ".join(dict.fromkeys(done.path for done in served)),
        "server-timing": _server_timing(served),
    }


def _server_timing(served: Sequence[PromptDone]) -> str:
    """Return the stages of the prompt that took longest to start."""
    times = max((done.times for done in served), key=lambda times: sum(_stages_ms(times).values()))
    parts = [f"{name};dur={milliseconds:.3f}" for name, milliseconds in _stages_ms(times).items()]
    if times.transport:
        hop = f';desc="bytes={times.kv_bytes} transport={times.transport}"'
        parts = [part + hop if part.startswith("send;") else part for part in parts]
    return ", ".join(parts)


def timing_metrics(done: RequestDone) -> dict[str, float | None]:
    """Return vLLM's `metrics` of a request: the time to the first token counts from placement; None if unknown."""
    prefill_s, decode_s, count = done.prefill_s, done.decode_s, done.num_output_tokens
    mean_s = decode_s / (count - 1) if decode_s is not None and count > 1 else None
    inference_s = 0.0 if prefill_s is None or decode_s is None else prefill_s + decode_s
    seconds = {
        "time_to_first_token_ms": prefill_s, "generation_time_ms": decode_s, "queue_time_ms": done.queue_s,
        "mean_itl_ms": mean_s,
    }  # fmt: skip
    found = {name: None if value is None else round(value * 1000, 3) for name, value in seconds.items()}
    return found | {"tokens_per_second": round(count / inference_s, 3) if inference_s else None}


def serving_report(served: Sequence[PromptDone], *, instances: bool) -> Any:
    """Return the usage chunk's `pdserve`: an object, or a list of them in prompt order for several prompts.

    `instances`: include the names of the instances, which reveal the operator's network.
    """
    reports = [_report(done, instances=instances) for done in sorted(served, key=lambda done: done.prompt_index)]
    return reports[0] if len(reports) == 1 else reports


def _report(done: PromptDone, *, instances: bool) -> dict[str, Any]:
    names = {"prefill_instance": done.prefill_instance, "decode_instance": done.decode_instance}
    return {
        "path": done.path,
        "reason": done.reason,
        **({"seconds": round(done.seconds, 6), "expected_s": round(done.expected_s, 6)} if done.expected_s else {}),
        **(names if instances else {}),
        "stages_ms": {name: round(milliseconds, 3) for name, milliseconds in _stages_ms(done.times).items()},
        "kv_bytes": done.times.kv_bytes,
        "kv_bytes_early": done.times.kv_bytes_early,
        "transport": done.times.transport,
    }


def _stages_ms(times: StageTimes) -> dict[str, float]:
    stages = {name: getattr(times, f"{name}_s") for name in STAGES}
    return {name: seconds * 1000 for name, seconds in stages.items() if seconds is not None}
