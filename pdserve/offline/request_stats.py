"""When a request came, was scheduled and had its tokens: vLLM's RequestStateStats, from Server-Timing. Pure."""

import re
from dataclasses import dataclass

_STAGE = re.compile(r"([a-z_]+);dur=([0-9.]+)")


@dataclass(slots=True)
class RequestStateStats:
    """`arrival_time` is seconds since 1970; the others that end in _ts are of this machine's monotonic clock.

    A prompt is scheduled where an instance has begun with it. The last token's time is that of the whole answer.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False


def request_stats(
    server_timing: str, *, arrival_time: float, queued_ts: float, last_token_ts: float, num_tokens: int
) -> RequestStateStats:
    """Return the times of one request; a stage that the header does not name took none."""
    stages_s = {name: float(milliseconds) / 1000 for name, milliseconds in _STAGE.findall(server_timing)}
    waited_s = stages_s.get("queue", 0.0)
    first_s = waited_s + stages_s.get("reserve", 0.0) + stages_s.get("prefill", 0.0)
    return RequestStateStats(
        num_tokens, arrival_time, queued_ts, queued_ts + waited_s, queued_ts + first_s, last_token_ts, first_s
    )
