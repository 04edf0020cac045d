"""POST /generate, with USE_OPENAI=0: the API of vLLM's first server (0.6: vllm/entrypoints/api_server.py).

    {"prompt": "Hello", "n": 2, "temperature": 0.8}   ->   {"text": ["Hello world", "Hello there"]}

A stream is a sequence of such objects, each with all the text so far, each terminated by a NUL byte.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from scheduler.api.completions import DEFAULT_MAX_TOKENS
from scheduler.api.described import AnyPrompt
from scheduler.api.errors import error_body, json_response, request_id_of
from scheduler.api.generation_body import GenerationBody
from scheduler.api.prepared import PreparedRequest, prepare_generation
from scheduler.api.prompts import encode_prompt, read_prompts
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id
from scheduler.api.sse import ClientGone, until_disconnect
from scheduler.app_context import AppContext
from scheduler.request import GenerationRequest
from scheduler.stream import TextStream
from telemetry.logs import EventLogger
from wire.errors import Draining

_log = EventLogger("api")
_HEADERS = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerateBody(GenerationBody):
    """The body of /generate: a prompt and sampling parameters only; `model` is optional."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prompt: AnyPrompt = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    detokenize: Literal[True] | None = None


async def generate(front: AppContext, request: Request) -> "Texts":
    """Return the response to one request, not yet run. Raises a PdserveError or HttpError for an invalid one."""
    body, tokens = await read_body(front, request, GenerateBody, takes_form=True), front.tokens
    front.model_named(body.model)
    bounded = body.truncate_prompt_tokens is None
    (given,) = read_prompts(body.prompt, max_prompts=1, max_model_len=tokens.max_model_len if bounded else None)
    add_special = body.add_special_tokens is not False
    ids = await encode_prompt(given, tokens, add_special_tokens=add_special, bounded=bounded)
    prepared = await prepare_generation(
        front, body, request, [ids], default_max_tokens=DEFAULT_MAX_TOKENS, param="prompt", continues_prompt=True
    )
    return Texts(prepared, new_id("gen"), given if isinstance(given, str) else tokens.decode(given))


@dataclass(frozen=True, slots=True)
class Texts:
    """An ASGI response that runs the request when called, and cancels it when the client disconnects."""

    prepared: PreparedRequest
    request_id: str
    prompt: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError only before anything was sent."""
        run = self._stream if self.prepared.asked.stream else self._whole
        with self.prepared.front.drain.request():
            _log.info("request_taken", request_id=self.request_id, http_id=request_id_of(scope), prompts=1)
            try:
                await until_disconnect(receive, run(scope, receive, send))
            except ClientGone as gone:
                _log.info("client_gone", request_id=self.request_id, reason=gone)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[str] = []
        async with aclosing(self._texts(scope)) as made:
            async for so_far in made:
                texts = so_far
        response = json_response({"text": texts})
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first frame is an HTTP status; after it, a frame that ends the stream."""
        front = self.prepared.front
        frames = _Frames(send)
        try:
            async with aclosing(self._texts(scope)) as made:
                async for texts in made:
                    await frames.write({"text": texts})
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if frames.started and front.drain.draining:
                await frames.write(error_body(Draining("the server is shutting down"), scope))
                await frames.end()
            raise
        except Exception as error:
            if not frames.started:
                raise
            await frames.write(error_body(error, scope))
        await frames.end()

    async def _texts(self, scope: Scope) -> AsyncGenerator[list[str], None]:
        """Yield all texts so far, each after its prompt, whenever one has grown."""
        prepared, front = self.prepared, self.prepared.front
        options = front.config.options
        request = GenerationRequest(
            self.request_id, prepared.prompts, prepared.params, options.first_token_timeout, options.stall_timeout,
            cache_salt=prepared.cache_salt, tenant=prepared.tenant, priority=prepared.priority,
        )  # fmt: skip
        observer, arrived_s = front.observer_of(scope["headers"]), scope["state"]["arrived_s"]
        output = TextStream(request, prepared.text, front.tokens, observer, started_s=arrived_s)
        texts = [self.prompt] * prepared.params.n
        async with aclosing(output.pieces(front.dispatcher)) as pieces:
            async for piece in pieces:
                texts[piece.index] += piece.text
                yield texts


class _Frames:
    """Writes one response of frames. http/protocol.py disconnects a client that does not read."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, body: dict[str, Any]) -> None:
        """Send a frame, preceded by the response headers if it is the first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._body(orjson.dumps(body) + b"\0", more=True)

    async def end(self) -> None:
        """End the response."""
        await self._body(b"", more=False)

    async def _body(self, content: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": content, "more_body": more}
        await self._send(message)
