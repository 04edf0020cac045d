"""How a request was served, for the user: token counts, stage times, bytes of the KV hop."""

from collections.abc import Sequence
from typing import Any

from scheduler.request import PromptDone
from scheduler.stream import TextStream
from wire.types import StageTimes

_STAGES = ("queue", "reserve", "prefill", "send", "first_step")


def usage(stream: TextStream, *, details: bool = False) -> dict[str, Any]:
    """Return OpenAI's token counts; with `details`, known at the end, how many prompt tokens were cached."""
    prompt, output = stream.num_prompt_tokens, stream.num_output_tokens
    counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    if details:
        cached = sum(done.times.cached_tokens for done in stream.served)
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def server_timing(served: Sequence[PromptDone]) -> str:
    """Return the Server-Timing header's value; of several prompts, the one that took longest to start."""
    if not served:
        return ""
    times = max((done.times for done in served), key=lambda times: sum(_stages_ms(times).values()))
    parts = [f"{name};dur={milliseconds:.3f}" for name, milliseconds in _stages_ms(times).items()]
    if times.transport:
        hop = f';desc="bytes={times.kv_bytes} transport={times.transport}"'
        parts = [part + hop if part.startswith("send;") else part for part in parts]
    return ", ".join(parts)


def report(served: Sequence[PromptDone]) -> Any:
    """Return the usage chunk's `pdserve`: an object, or a list of them in prompt order for several prompts."""
    told = [_told(done) for done in sorted(served, key=lambda done: done.prompt)]
    return told[0] if len(told) == 1 else told


def _told(done: PromptDone) -> dict[str, Any]:
    return {
        "path": done.path,
        "reason": done.reason,
        "prefill_instance": done.prefill_instance,
        "decode_instance": done.decode_instance,
        "stages_ms": {name: round(milliseconds, 3) for name, milliseconds in _stages_ms(done.times).items()},
        "kv_bytes": done.times.kv_bytes,
        "kv_bytes_early": done.times.kv_bytes_early,
        "transport": done.times.transport,
    }


def _stages_ms(times: StageTimes) -> dict[str, float]:
    stages = {name: getattr(times, f"{name}_s") for name in _STAGES}
    return {name: seconds * 1000 for name, seconds in stages.items() if seconds is not None}
