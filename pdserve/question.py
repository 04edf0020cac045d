"""Ask a served model one question over HTTP, stream the answer, and return its timings."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdserve.client import Client
from wire.errors import Unavailable


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Timings of one streamed answer: TTFT as measured by the client, the KV hop as measured by the cluster."""

    ttft_s: float
    tokens: int
    tokens_per_s: float
    kv_bytes: int | None
    hop_ms: float | None
    transport: str
    early_bytes: int = 0

    def __str__(self) -> str:
        tokens = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        shown = f"TTFT {self.ttft_s * 1000:.0f} ms, {tokens}, {self.tokens_per_s:.1f} tokens/s"
        if not self.kv_bytes:
            return f"{shown}; no KV hop (served by one instance)"
        hop = "" if self.hop_ms is None else f" in {self.hop_ms:.1f} ms"
        hop = f"{shown}; KV hop: {self.kv_bytes:,} bytes{hop} over {self.transport or '?'}"
        return f"{hop}, {self.early_bytes / self.kv_bytes:.0%} of them during prefill" if self.early_bytes else hop


def served_model(client: Client) -> str:
    """Return the first served model. Raises Unavailable when there is none."""
    body = client.get("/v1/models").json()
    try:
        return str(body["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise Unavailable(f"{client.base_url}/v1/models lists no model") from None


def ask(
    client: Client, model: str, question: str, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> AnswerTimes:
    """Ask one question and pass the answer's pieces to `show`. Raises Unavailable, also for an empty answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 96,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    began = clock()
    first: float | None = None
    usage: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for event in client.stream("/v1/chat/completions", body):
        text = _text(event)
        if text:
            first = clock() if first is None else first
            show(text)
        usage = event.get("usage") or usage
        extra = event.get("pdserve") or (event.get("usage") or {}).get("pdserve") or extra
    if first is None:
        raise Unavailable("the answer had no text")
    return _answer_times(began, first, clock(), usage, extra)


def _answer_times(
    began: float, first: float, ended: float, usage: dict[str, Any], extra: dict[str, Any]
) -> AnswerTimes:
    tokens = int(usage.get("completion_tokens", 0))
    stages = extra.get("stages_ms") or {}
    return AnswerTimes(
        ttft_s=first - began,
        tokens=tokens,
        tokens_per_s=(tokens - 1) / (ended - first) if tokens > 1 and ended > first else 0.0,
        kv_bytes=extra.get("kv_bytes"),
        hop_ms=stages.get("send"),
        transport=str(extra.get("transport") or ""),
        early_bytes=int(extra.get("kv_bytes_early") or 0),
    )


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")
