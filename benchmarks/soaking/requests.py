"""The requests of a soak: one function for each kind. Each sends one request and returns its outcome.

`answered`    as expected, and equal to every earlier answer to the same body
`refused`     a bad request got the expected status, with a message
`left`        the client disconnected in the middle, on purpose
`failed`      an error with a message: a status of 429 or from 500 up, or an error event that ends the stream
`wrong`       an answer other than the expected one
`unfinished`  no answer within the deadline, or a stream or connection that stopped without an error
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdserve.bench.load.sse import EventReader

ANSWERED, REFUSED, LEFT, FAILED, WRONG, UNFINISHED = "answered", "refused", "left", "failed", "wrong", "unfinished"
_SENTENCE = (
    "river mountain engine window garden letter winter ocean paper silver candle bridge market forest thunder violin "
    "harbor lantern meadow compass orchard marble whisper canyon feather granite"
)
_WORDS = _SENTENCE.split()
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
_BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": -1}, 400),
    ({"model": "no-such-model"}, 404),
    ({"max_tokens": 10**9}, 400),
    ({"prompt": []}, 400),
    ({"stop": ["a"] * 100}, 400),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request, and the error's message."""

    kind: str
    how: str
    message: str = ""


class Incomplete(Exception):
    """A stream stopped without [DONE] and without an error."""


class ServerFailed(Exception):
    """The server answered with an error that a good request may get."""


class Unexpected(Exception):
    """A good request was refused."""


@dataclass
class SoakClient:
    """Sends requests for one model to one URL; keeps earlier answers: an equal body must get an equal answer."""

    session: aiohttp.ClientSession
    model: str
    rng: random.Random
    deadline_s: float
    known: dict[str, Any] = field(default_factory=dict)

    async def ask(self, kind: str) -> Outcome:
        """Send one request of this kind and wait for its outcome."""
        try:
            async with asyncio.timeout(self.deadline_s):
                how, message = await KINDS[kind](self)
        except ServerFailed as error:
            how, message = FAILED, str(error)
        except Unexpected as error:
            how, message = WRONG, str(error)
        except TimeoutError:
            how, message = UNFINISHED, f"nothing within {self.deadline_s:g} s"
        except (aiohttp.ClientError, ConnectionError, Incomplete) as error:
            how, message = UNFINISHED, f"{type(error).__name__}: {error}"
        return Outcome(kind, how, message)

    def text(self, number: int, words: int) -> str:
        """Return text `number`, always the same; every fourth one has the same start."""
        own = random.Random(number)
        start = _WORDS[:12] if number % 4 == 0 else []
        return "Write a story of " + " ".join([*start, *(own.choice(_WORDS) for _ in range(words))])

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return a JSON answer. Raises ServerFailed, Unexpected."""
        async with self.session.post(path, json={"model": self.model, **body}) as response:
            content = await response.read()
            _check(response.status, content)
            return json.loads(content)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield a stream's events up to [DONE]. Raises ServerFailed, Unexpected, Incomplete."""
        async with self.session.post(path, json={"model": self.model, **body, "stream": True}) as response:
            if response.status != 200:
                _check(response.status, await response.read())
            reader = EventReader()
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerFailed(f"in the stream: {event['error']['message']}")
                    yield event
        raise Incomplete("the stream stopped without [DONE] or an error")

    def same(self, name: str, answer: Any) -> tuple[str, str]:
        """Compare with the first answer of this name."""
        first = self.known.setdefault(name, answer)
        return (ANSWERED, "") if first == answer else (WRONG, f"{name}: {answer!r:.160}, but first {first!r:.160}")


async def _greedy(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(40)
    body = {"prompt": client.text(number, 10 + 5 * number), "max_tokens": 8 + number, "temperature": 0}
    return client.same(f"greedy {number}", await _stream_completion(client, body))


async def _seeded(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(20)
    body = {
        "prompt": client.text(number, 30), "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": number,
        "presence_penalty": 0.5,
    }  # fmt: skip
    return client.same(f"seeded {number}", await _stream_completion(client, body))


async def _long(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(6)
    body = {"prompt": client.text(100 + number, 700), "max_tokens": 6, "temperature": 0}
    return client.same(f"long {number}", await _stream_completion(client, body))


async def _schema(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(10)
    answer = await client.post("/v1/chat/completions", {
        "messages": [{"role": "user", "content": f"Name a city and its people. {client.text(number, 5)}"}],
        "max_tokens": 64, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}},
    })  # fmt: skip
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        city = json.loads(choice["message"]["content"])
        if set(city) != {"city", "people"} or not isinstance(city["people"], int):
            return WRONG, f"does not match its schema: {city!r:.160}"
    return client.same(f"schema {number}", choice["message"]["content"])


async def _choices(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(10)
    answer = await client.post("/v1/completions", {
        "prompt": client.text(number, 20), "max_tokens": 12, "n": 3, "temperature": 1.0, "seed": number, "logprobs": 2,
    })  # fmt: skip
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    if len(texts) != 3 or any(len(choice["logprobs"]["tokens"]) > 12 for choice in answer["choices"]):
        return WRONG, f"expected 3 choices of 12 tokens: {texts!r:.160}"
    return client.same(f"choices {number}", texts)


async def _disconnect(client: SoakClient) -> tuple[str, str]:
    after = client.rng.randrange(6)
    body = {"prompt": client.text(client.rng.randrange(1000), 60), "max_tokens": 60, "temperature": 0}
    events = client.events("/v1/completions", body)
    try:
        for _ in range(after):
            await anext(events)
    except StopAsyncIteration:
        return ANSWERED, ""
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    return LEFT, ""


async def _leaves_unasked(client: SoakClient) -> tuple[str, str]:
    body = {"prompt": client.text(client.rng.randrange(1000), 60), "max_tokens": 40, "temperature": 0}
    pending = asyncio.ensure_future(client.post("/v1/completions", body))
    await asyncio.wait([pending], timeout=client.rng.random() / 2)
    if pending.done():
        return (ANSWERED, "") if await pending else (WRONG, "an empty answer")
    pending.cancel()
    await asyncio.wait([pending])
    return LEFT, ""


async def _invalid(client: SoakClient) -> tuple[str, str]:
    change, due = client.rng.choice(_BAD)
    async with client.session.post(
        "/v1/completions", json={"model": client.model, "prompt": "x", "max_tokens": 4, **change}
    ) as response:
        content = await response.read()
    if response.status != due or not _message(content):
        return WRONG, f"{change!r:.80}: {response.status} instead of {due}: {content[:160]!r}"
    return REFUSED, ""


async def _vector(client: SoakClient) -> tuple[str, str]:
    number = client.rng.randrange(10)
    answer = await client.post("/v1/embeddings", {"input": client.text(number, 20)})
    vector = answer["data"][0]["embedding"]
    return client.same(f"vector {number}", [round(value, 3) for value in vector])


async def _stream_completion(client: SoakClient, body: dict[str, Any]) -> tuple[str, str | None]:
    text, finish = "", None
    async for event in client.events("/v1/completions", body):
        for choice in event["choices"]:
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return text, finish


def _check(status: int, content: bytes) -> None:
    """Raise ServerFailed for a status of 429 or from 500 up, Unexpected for any other but 200."""
    if status != 200:
        raise (ServerFailed if status == 429 or status >= 500 else Unexpected)(f"{status}: {_message(content)}")


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


KINDS: dict[str, Callable[[SoakClient], Awaitable[tuple[str, str]]]] = {
    "greedy": _greedy, "seeded": _seeded, "long": _long, "schema": _schema, "choices": _choices, "leaves": _disconnect,
    "leaves_unasked": _leaves_unasked, "bad": _invalid, "vector": _vector,
}  # fmt: skip
WEIGHTS = {
    "greedy": 8, "seeded": 4, "long": 1, "schema": 2, "choices": 2, "leaves": 4, "leaves_unasked": 3, "bad": 3,
    "vector": 1,
}  # fmt: skip
