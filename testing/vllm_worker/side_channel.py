"""How fake workers read, register for and push KV: JSON over HTTP at a reference's `remote_host` and `remote_port`."""

from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web

from testing.vllm_worker.continuation import KvEntry
from testing.vllm_worker.layerwise import take_kv
from testing.vllm_worker.push import LoadFailed, take_registration
from testing.vllm_worker.rank import WorkerRank

_LIMIT = aiohttp.ClientTimeout(total=10)


async def serve_rank(
    request: web.Request, rank: WorkerRank, session: aiohttp.ClientSession, *, wrong_200: bool
) -> web.Response:
    """Answer one message: `read` (and free) blocks, `end` (free them unread), `register` for KV, or `push` KV."""
    message = await request.json()
    request_id = message["request_id"]
    if message["engine_id"] != rank.engine_id:
        raise web.HTTPConflict(text="engine id")
    if message["verb"] in ("push", "register"):
        if message["verb"] == "push":
            take_kv(rank, message)
        else:
            await take_registration(rank, session, message)
        return web.json_response({"kv": []})
    is_known = all(block_id < rank.num_blocks for block_id in message["block_ids"])
    if not (is_known or wrong_200):
        raise web.HTTPConflict(text="block ids")
    is_garbage = wrong_200 and not (is_known and rank.holds(request_id))
    kv = rank.read(message["block_ids"]) if message["verb"] == "read" and not is_garbage else []
    rank.end(request_id)
    return web.json_response({"kv": kv})


class RemoteBlocks:
    """The blocks that one reference names, from the decode worker's side.

    `peers` are the side channels by engine id: vLLM connects to the first address that it meets with an id, and reads
    there what later references with this id name, until that fails (NixlBaseConnectorWorker._remote_agents).
    """

    def __init__(self, session: aiohttp.ClientSession, reference: dict[str, Any], peers: dict[str, str]) -> None:
        self._session, self._reference, self._peers = session, reference, peers

    async def read(self, num_tokens: int | None) -> list[KvEntry]:
        """Read the KV of `num_tokens` tokens (None: all), even of reused blocks, and free the blocks."""
        kv = [(int(token_id), int(salt)) for token_id, salt in await self._post("read")]
        if num_tokens is None:
            return kv
        return [*kv, *[(0, 0)] * (num_tokens - len(kv))][:num_tokens]

    async def end(self) -> None:
        """Free the blocks without reading them."""
        await self._post("end")

    async def _post(self, verb: str) -> Sequence[Any]:
        reference, engine_id = self._reference, self._reference["remote_engine_id"]
        message = {
            "verb": verb,
            "engine_id": engine_id,
            "request_id": reference["remote_request_id"],
            "block_ids": [block_id for group in reference["remote_block_ids"] for block_id in group],
        }
        url = self._peers.setdefault(engine_id, f"http://{reference['remote_host']}:{reference['remote_port']}/")
        try:
            async with self._session.post(url, json=message, timeout=_LIMIT) as answer:
                if answer.status != 200:
                    raise LoadFailed(await answer.text())
                return list((await answer.json())["kv"])
        except LoadFailed:
            self._peers.pop(engine_id, None)
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            self._peers.pop(engine_id, None)
            raise LoadFailed(str(error)) from error
