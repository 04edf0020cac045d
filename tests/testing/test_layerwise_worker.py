"""The fake worker of the layer-wise connector keeps the rules of its docstring."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from testing.engine.fake_model import FakeConfig
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker
from tests.scheduler.virtual_time import until

PROMPT = list(range(10, 30))
SETTINGS = WorkerSettings(FakeConfig(num_layers=1, vocab_size=1000), connector="ascend-layerwise")


class Pair:
    """A prefill and a decode worker, and a socket that breaks the first `broken` calls and keeps the rest."""

    def __init__(self, broken: int) -> None:
        self.prefill, self.decode = FakeVllmWorker(SETTINGS), FakeVllmWorker(SETTINGS)
        self.calls: list[bytes] = []
        self.num_tries = 0
        self.url = ""
        self._broken = broken

    @asynccontextmanager
    async def running(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Run all three."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        await self.prefill.start()
        await self.decode.start()
        try:
            async with aiohttp.ClientSession() as session:
                yield session
        finally:
            await self.prefill.stop()
            await self.decode.stop()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_tries += 1
        if self.num_tries > self._broken:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            self.calls.append(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


async def _post(session: aiohttp.ClientSession, worker: FakeVllmWorker, request_id: str, transfer: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 2, "min_tokens": 2, "temperature": 0, "kv_transfer_params": transfer}
    headers = {"X-Request-Id": request_id}
    async with session.post(f"{worker.url}/v1/completions", json=body, headers=headers) as answer:
        return await answer.json()


@pytest.mark.parametrize(
    ("broken", "prefill_id", "is_served"),
    [(0, "R", True), (2, "R", True), (3, "R", False), (0, "other", False)],
    ids=["first try", "third try", "no fourth try", "another id"],
)
@pytest.mark.anyio
async def test_decode_is_served_where_the_sources_serve_it(broken: int, prefill_id: str, is_served: bool) -> None:
    pair = Pair(broken)
    async with pair.running() as session:
        asked = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": pair.url}
        decode = asyncio.create_task(_post(session, pair.decode, "R", asked))
        await until(lambda: pair.num_tries >= min(broken + 1, 3))
        if broken < 3:
            await until(lambda: pair.calls)
            wanted = orjson.loads(pair.calls[0])
            answer = await _post(session, pair.prefill, prefill_id, wanted)
            assert answer["kv_transfer_params"] is None
            assert pair.prefill.ranks[0].kv_usage == 0
        done, _ = await asyncio.wait({decode}, timeout=10.0 if is_served else 0.3)
        assert bool(done) == is_served
        assert pair.num_tries == min(broken + 1, 3)
        rank = pair.decode.ranks[0]
        assert (rank.running, rank.waiting) == (0, 0 if is_served else 1)
        decode.cancel()
