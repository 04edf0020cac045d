"""The HTTP server of a fake vLLM worker, in this process on real sockets.

    worker = FakeVllmWorker(WorkerSettings())
    await worker.start()
    worker.faults.add(Fault("die", "during", after_tokens=3))
    ...
    await worker.stop()

A client that goes away aborts its request. `POST /testing/faults` adds a fault to a worker of another process.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from testing.vllm_worker.answer import DONE, FakeAnswer
from testing.vllm_worker.answer_body import AnswerBody, error_body, event
from testing.vllm_worker.bad_request import BadRequest
from testing.vllm_worker.chat_answer import ChatAnswer
from testing.vllm_worker.faults import Fault, Faults
from testing.vllm_worker.generation import FakeGeneration
from testing.vllm_worker.push import LoadFailed, engines
from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.request import FakeBody, Leg, read_body
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.side_channel import RemoteBlocks, serve_rank
from testing.vllm_worker.worker_metrics import metrics_text

_CHATS = "/v1/chat/completions"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_MAX_BODY = 64 * 2**20
_NEEDED = {"nixl": "remote_block_ids", "nixl-push": "tp_size"}
_ACCEPT_TURNS = 4
"""Turns of the loop until the server knows a connection that it has just accepted."""
_SHUTDOWN_S = 0.05  # for handlers whose client is already cut off; 0 would be no limit


@dataclass(frozen=True, slots=True)
class Received:
    """A completion as received; names of headers in lower case."""

    leg: Leg
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnsweredPrefill:
    """A prompt whose prefill was answered, the cached tokens that the answer reports, and when, by the loop's clock."""

    prompt: tuple[int, ...]
    cached_tokens: int
    at: float


class FakeVllmWorker:
    """Owner of the ranks and the sockets. After `stop` it can be started again, like a process that is restarted."""

    def __init__(
        self, settings: WorkerSettings, on_death: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_death` ends the process for the fault `die`; by default only the sockets break, as if it had ended.

        `on_stop` suspends the process for the fault `stop`; by default only the worker's work stands still.
        """
        self.settings = settings
        self.received: list[Received] = []
        self.prefilled: list[AnsweredPrefill] = []
        self.ranks: list[WorkerRank] = []
        self.faults = Faults(on_death or self._die, on_stop or self._freeze)
        self._runners: list[web.AppRunner] = []
        self._session: aiohttp.ClientSession | None = None
        self._started_at = 0.0
        self._death: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.settings.host}:{self.settings.port}"

    async def start(self) -> None:
        """Listen, on free ports if none is set; a restart uses the same ports."""
        settings, fake = self.settings, self.settings.fake
        self._session, self._started_at = aiohttp.ClientSession(), time.time()
        side_ports = [rank.side_channel_port for rank in self.ranks]
        self.ranks = [
            WorkerRank(number, fake.num_blocks, fake.block_size, settings.max_num_seqs, settings.engine_id)
            for number in range(settings.num_ranks)
        ]
        for rank, port in zip(self.ranks, [*side_ports, *[0] * settings.num_ranks], strict=False):
            rank.side_channel_port = await self._listen(self._side_channel(rank), port)
        bootstrap_port = 0
        if settings.connector == "mooncake":
            bootstrap_port = await self._listen(self._bootstrap(), settings.bootstrap_port)
        port = await self._listen(self._app(), settings.port)
        self.settings = replace(settings, port=port, bootstrap_port=bootstrap_port)

    async def stop(self) -> None:
        """Break every connection at once, as the end of the process does. Idempotent."""
        runners, self._runners = self._runners, []
        for runner in runners:
            for site in runner.sites:
                await site.stop()
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
            for connection in runner.server.connections if runner.server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def hide(self) -> None:
        """Close the API, as if its network had failed: the process lives, and decode workers can read its KV."""
        await self._runners.pop().cleanup()

    def _die(self) -> None:
        self._death = asyncio.create_task(self.stop())

    def _freeze(self) -> None:
        for rank in self.ranks:
            rank.freeze()

    async def _listen(self, app: web.Application, port: int) -> int:
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, self.settings.host, port).start()
        return int(runner.addresses[0][1])

    def _side_channel(self, rank: WorkerRank) -> web.Application:
        async def serve(request: web.Request) -> web.Response:
            assert self._session is not None, "it is started"
            await rank.pause()
            fault = self.faults.take_read() if (await request.json())["verb"] == "read" else None
            if fault is not None:
                return await self.faults.meet(fault, request)
            return await serve_rank(request, rank, self._session, wrong_200=self.settings.wrong_200)

        app = web.Application()
        app.router.add_post("/", serve)
        return app

    def _bootstrap(self) -> web.Application:
        async def serve(_: web.Request) -> web.Response:
            return web.json_response(engines(self.ranks, self.settings.host))

        app = web.Application()
        app.router.add_get("/query", serve)
        return app

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key], client_max_size=_MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post(_CHATS, self._completions)
        app.router.add_post("/testing/faults", self._add_fault)
        return app

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await self.ranks[0].pause()
        key = self.settings.api_key
        if key is not None and request.path.startswith(_GUARDED):
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.settings.version})

    async def _models(self, _: web.Request) -> web.Response:
        row = {"id": self.settings.model, "object": "model", "created": int(self._started_at), "owned_by": "vllm"}
        row |= {"root": self.settings.model, "parent": None, "max_model_len": self.settings.fake.max_model_len}
        return web.json_response({"object": "list", "data": [row]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = metrics_text(self.settings, self.ranks, self._started_at)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _add_fault(self, request: web.Request) -> web.Response:
        self.faults.add(Fault(**await request.json()))
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.json()
        try:
            body = read_body(raw, self.settings.model, self.settings.fake, is_chat=request.path == _CHATS)
            rank = self._rank(request.headers.get("X-data-parallel-rank"))
        except BadRequest as error:
            await self._free_remote(raw.get("kv_transfer_params"))
            return web.json_response(error_body(str(error), error.kind, error.status, error.param), status=error.status)
        self.received.append(Received(body.leg, {name.lower(): value for name, value in request.headers.items()}, raw))
        needed = _NEEDED.get(self.settings.connector)
        if body.leg == "decode" and needed is not None and not body.names_engine(needed):
            return await self.faults.crash(at_once=not body.transfer.get(needed))
        if body.late_error is not None:
            return await _refuse_late(request, body, body.late_error)
        fault = self.faults.take(body.leg)
        if fault is not None and fault.point == "before":
            return await self.faults.meet(fault, request)
        answer = self._answer(request, rank, body, raw, fault)
        response = await answer.send()
        if body.leg == "prefill" and fault is None:
            now = asyncio.get_running_loop().time()
            self.prefilled += [AnsweredPrefill(one.prompt, one.cached_tokens, now) for one in answer.generations]
        return response

    def _answer(
        self, request: web.Request, rank: WorkerRank, body: FakeBody, raw: dict[str, Any], fault: Fault | None
    ) -> FakeAnswer:
        session, settings = self._session, self.settings
        assert session is not None, "it is started"
        own_id = request.headers.get("X-Request-Id") or raw.get("request_id") or uuid.uuid4().hex
        request_id = f"chatcmpl-{own_id}" if body.is_chat else f"cmpl-{own_id}"
        ids = [request_id] if body.is_chat else [f"{request_id}-{number}" for number in range(len(body.prompts))]
        generations = [
            FakeGeneration(settings, rank, session, f"{one}-{uuid.uuid4().hex[:8]}", body, prompt)
            for one, prompt in zip(ids, body.prompts, strict=True)
        ]
        form = AnswerBody(request_id, settings.model, body)
        return FakeAnswer(
            request,
            rank,
            body,
            ChatAnswer(form) if body.is_chat else form,
            generations,
            self.faults,
            fault,
            settings.tokens_per_chunk,
        )

    def _rank(self, named: str | None) -> WorkerRank:
        if named is None or not named.isdecimal():
            return min(self.ranks, key=lambda rank: rank.running + rank.waiting)
        if int(named) >= len(self.ranks):
            raise BadRequest(f"data_parallel_rank {named} is out of range [0, {len(self.ranks)}).")
        return self.ranks[int(named)]

    async def _free_remote(self, reference: Any) -> None:
        """Free the blocks that a prefill worker holds for a request that this worker has refused."""
        if reference and reference.get("do_remote_prefill") and self._session is not None:
            with suppress(LoadFailed, KeyError):
                await RemoteBlocks(self._session, reference, self.ranks[0].peers).end()


async def _refuse_late(request: web.Request, body: FakeBody, error: BadRequest) -> web.StreamResponse:
    """Refuse a request in the engine, after its stream has begun; the blocks that prefill holds for it stay held."""
    found = error_body(str(error), error.kind, error.status, error.param)
    if not body.stream:
        return web.json_response(found, status=error.status)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(event(found) + DONE)
    return response
