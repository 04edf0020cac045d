"""A client of vLLM workers for tests: the two legs of a hand-off, and an answer as received."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LIMIT = aiohttp.ClientTimeout(total=300)  # real workers compile kernels for the first request of a kind
PREFILL = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")) | {
    "do_remote_decode": True,
    "do_remote_prefill": False,
}
"""What the first leg sends as `kv_transfer_params`."""


@dataclass(slots=True)
class Answer:
    """A status with a JSON body, or the events of a stream; `is_done` once [DONE] came, `is_cut` if it broke off."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    is_done: bool = False
    is_cut: bool = False

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices of the body, or of all events."""
        return [one for part in (self.body, *self.events) for one in part.get("choices", ())]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of sequence 0."""
        return self.tokens_of(0)

    def tokens_of(self, index: int) -> list[int]:
        """Return the tokens of one sequence."""
        return [token for one in self.choices if one["index"] == index for token in one["token_ids"] or ()]

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the body, or of the last event that has it."""
        return next(part["usage"] for part in (self.body, *reversed(self.events)) if part.get("usage"))

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body, or of the last event that has one."""
        return next(part["error"] for part in (self.body, *reversed(self.events)) if "error" in part)


class WorkerClient:
    """Sends requests to workers; the caller owns the session."""

    def __init__(self, session: aiohttp.ClientSession, model: str, body: dict[str, Any]) -> None:
        """`body` has the fields that every completion of this client has."""
        self.session, self._body = session, {"model": model, "return_token_ids": True, **body}

    async def complete(self, url: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Send a completion and read the answer to its end."""
        body = self._body | fields
        async with self.session.post(f"{url}/v1/completions", json=body, headers=headers, timeout=LIMIT) as response:
            answer = Answer(response.status)
            raw = b""
            try:
                async for piece in response.content.iter_any():
                    raw += piece
            except (aiohttp.ClientError, TimeoutError):
                answer.is_cut = True
            return _read(answer, response.content_type, raw.decode())

    async def stream(self, url: str, **fields: Any) -> Answer:
        """Send a completion that streams, with usage."""
        return await self.complete(url, stream=True, stream_options={"include_usage": True}, **fields)

    async def prefill(self, url: str, **fields: Any) -> Answer:
        """Send the first leg of a hand-off."""
        fields = {key: value for key, value in fields.items() if key not in ("max_tokens", "min_tokens")}
        return await self.complete(url, **fields, max_tokens=1, kv_transfer_params=PREFILL)

    async def hand_off(self, prefill_url: str, decode_url: str, **fields: Any) -> Answer:
        """Send both legs; return the stream of the second."""
        first = await self.prefill(prefill_url, **fields)
        assert first.status == 200, first
        return await self.stream(decode_url, **fields, kv_transfer_params=first.body["kv_transfer_params"])

    async def gauge(self, url: str, name: str) -> float:
        """Return a metric, summed over its labels."""
        async with self.session.get(f"{url}/metrics", timeout=LIMIT) as response:
            text = await response.text()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    async def until(self, url: str, name: str, accept: Callable[[float], bool], limit_s: float = 120.0) -> float:
        """Wait until a metric has a value that `accept` accepts; return it."""
        async with asyncio.timeout(limit_s):
            while not accept(value := await self.gauge(url, name)):  # noqa: ASYNC110 - it may be another process
                await asyncio.sleep(0.02)
        return value


def _read(answer: Answer, content_type: str, raw: str) -> Answer:
    if content_type == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line.startswith("data: ")]
        answer.is_done = lines[-1:] == ["[DONE]"]
        answer.events = [json.loads(line) for line in lines if line != "[DONE]"]
    elif content_type == "application/json":
        answer.body = json.loads(raw)
    else:
        answer.text = raw
    return answer
