"""The times of a request as vLLM's RequestStateStats, from the Server-Timing header. Pure."""

import re
from dataclasses import dataclass

_STAGE = re.compile(r"([a-z_]+);dur=([0-9.]+)")


@dataclass(slots=True)
class RequestStateStats:
    """`arrival_time` is in seconds since 1970; fields with _ts are on this machine's monotonic clock.

    A prompt is scheduled when an instance begins it. The last token's time is the end of the response.
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
    """Return the times of one request; a stage missing from the header took no time."""
    stages_s = {name: float(milliseconds) / 1000 for name, milliseconds in _STAGE.findall(server_timing)}
    waited_s = stages_s.get("queue", 0.0)
    first_s = waited_s + stages_s.get("reserve", 0.0) + stages_s.get("prefill", 0.0)
    return RequestStateStats(
        num_tokens, arrival_time, queued_ts, queued_ts + waited_s, queued_ts + first_s, last_token_ts, first_s
    )
