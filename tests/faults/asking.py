"""One streamed completion as a client sees it: its tokens, its outcome and the time of it."""

import json
import time
from dataclasses import dataclass, field

import httpx

from tests.faults.cases import ANSWER, CLOSED, ERROR


@dataclass
class Seen:
    """What one client saw. `words` are a fake engine's tokens, `ending` is one of cases' three. `ended_at` is
    `time.time()`.
    """

    words: list[str] = field(default_factory=list)
    ending: str = ""
    message: str = ""
    ended_at: float = 0.0
    text: str = ""
    num_tokens: int = 0


async def ask(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, **fields: float) -> Seen:
    """Send one request and read its answer to whatever outcome it has; fails if that is none of the three."""
    seen = Seen()
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                await _read(response, seen)
            else:
                seen.message = json.loads(await response.aread())["error"]["message"]
                seen.ending = ERROR
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError) as error:
        seen.ending, seen.message = CLOSED, f"{error!r} after {seen.ending or 'no ending'}"
    seen.ended_at = time.time()
    return seen


async def _read(response: httpx.Response, seen: Seen) -> None:
    reason = None
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        assert not seen.ending, f"{line} came after the finish {seen}"
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            assert reason == "length", f"[DONE] after {seen.words} with finish_reason {reason}"
            seen.ending = ANSWER
            continue
        event = json.loads(data)
        if "error" in event:
            seen.ending, seen.message = ERROR, event["error"]["message"]
            continue
        if not event["choices"]:
            seen.num_tokens = event["usage"]["completion_tokens"]
            continue
        choice = event["choices"][0]
        seen.text += choice["text"]
        seen.words += choice["text"].split()
        assert reason is None, f"{line} came after finish_reason {reason}"
        reason = choice["finish_reason"]
    assert seen.ending, f"the stream ended without a word after {seen.words}, finish_reason {reason}"
