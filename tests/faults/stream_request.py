"""Send a streamed completion and record what the client receives."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from tests.faults.cases import ANSWER, CLOSED, ERROR


@dataclass
class StreamResult:
    """What one client received: `outcome` is ANSWER, ERROR or CLOSED, `ended_at` a `time.time()`."""

    tokens: list[str] = field(default_factory=list)
    outcome: str = ""
    message: str = ""
    ended_at: float = 0.0
    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None


async def request_stream(
    client: httpx.AsyncClient, prompt: list[int], max_tokens: int,
    on_token: Callable[[int], None] = lambda count: None, **fields: float,
) -> StreamResult:  # fmt: skip
    """Send one request and read its answer to the end. Fails if the stream ends in any other way.

    `on_token` gets the number of events with a token so far.
    """
    result = StreamResult()
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                await _read(response, result, on_token)
            else:
                result.message = json.loads(await response.aread())["error"]["message"]
                result.outcome = ERROR
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError) as error:
        result.outcome, result.message = CLOSED, f"{error!r} after {result.outcome or 'no outcome'}"
    result.ended_at = time.time()
    return result


async def _read(response: httpx.Response, result: StreamResult, on_token: Callable[[int], None]) -> None:
    reason, num_events = None, 0
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        assert not result.outcome, f"{line} came after the finish {result}"
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            assert reason == "length", f"[DONE] after {result.tokens} with finish_reason {reason}"
            result.outcome = ANSWER
            continue
        event = json.loads(data)
        if "error" in event:
            result.outcome, result.message = ERROR, event["error"]["message"]
            continue
        if not event["choices"]:
            usage = event["usage"]
            result.num_tokens, result.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            result.num_cached_tokens = (usage["prompt_tokens_details"] or {}).get("cached_tokens")
            continue
        choice = event["choices"][0]
        result.text += choice["text"]
        result.tokens += choice["text"].split()
        assert reason is None, f"{line} came after finish_reason {reason}"
        reason = choice["finish_reason"]
        num_events += 1
        on_token(num_events)
    assert result.outcome, f"the stream ended without an outcome after {result.tokens}, finish_reason {reason}"
