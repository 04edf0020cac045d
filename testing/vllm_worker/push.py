"""The order of NixlPushConnector and MooncakeConnector: decode registers with prefill, which sends the KV.

After vLLM 0.32:
NixlPushConnectorScheduler.update_state_after_alloc   decode registers at the engine that its request names
NixlPushConnectorWorker._pop_matching_registration    prefill finds it by the request id without its random suffix
NixlPushConnectorWorker._do_send_reg_notif            a known engine that is gone is not an error: decode keeps waiting
NixlPushConnectorScheduler.request_finished           prefill holds the KV for the lease; later, decode keeps waiting
MooncakeConnectorScheduler.update_state_after_alloc   the same by `transfer_id`; with a field missing decode waits
MooncakeConnectorWorker.handle_new_engine_id          an engine that the bootstrap server does not name is an error
MooncakeConnectorScheduler.request_finished           prefill's answer has no reference
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp

from testing.vllm_worker.continuation import KvEntry
from testing.vllm_worker.layerwise import SUFFIX, send_kv
from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.settings import WorkerSettings

_LIMIT = aiohttp.ClientTimeout(total=10)
_MOONCAKE = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class LoadFailed(Exception):
    """The KV of a reference cannot be read."""


async def wait_for_kv(
    settings: WorkerSettings, rank: WorkerRank, session: aiohttp.ClientSession, transfer: dict[str, Any],
    request_id: str, block_ids: list[int],
) -> list[KvEntry]:  # fmt: skip
    """Register a request with these blocks, and wait for its KV without a limit. Raises LoadFailed."""
    key = _key(transfer, request_id)
    return await rank.receive(key, block_ids, partial(_register, settings, rank, session, transfer, key))


async def offer_kv(
    rank: WorkerRank, session: aiohttp.ClientSession, transfer: dict[str, Any], request_id: str, kv: Sequence[KvEntry]
) -> None:
    """Send the KV of a held prefill to the decode worker that registered for it or will register later."""
    key = _key(transfer, request_id)
    rank.offers[key] = (request_id, kv)
    await _send(rank, session, key)


async def take_registration(rank: WorkerRank, session: aiohttp.ClientSession, message: dict[str, Any]) -> None:
    """Keep a decode worker's registration, and send the KV if it is there."""
    rank.registrations[message["request_id"]] = message["wanted"]
    await _send(rank, session, message["request_id"])


def engines(ranks: Sequence[WorkerRank], host: str) -> dict[str, Any]:
    """Return the bootstrap server's answer to GET /query."""
    return {
        str(rank.number): {
            "engine_id": rank.engine_id,
            "worker_addr": {"0": {"0": f"http://{host}:{rank.side_channel_port}/"}},
        }
        for rank in ranks
    }


def _key(transfer: dict[str, Any], request_id: str) -> str:
    return str(transfer.get("transfer_id") or request_id[:-SUFFIX])


async def _send(rank: WorkerRank, session: aiohttp.ClientSession, key: str) -> None:
    request_id, kv = rank.offers.get(key, ("", ()))
    if key in rank.registrations and rank.holds(request_id):
        del rank.offers[key]
        await send_kv(session, rank.registrations.pop(key), key, kv)
        rank.end(request_id)


async def _register(
    settings: WorkerSettings, rank: WorkerRank, session: aiohttp.ClientSession, transfer: dict[str, Any], key: str
) -> None:
    if settings.connector == "mooncake" and not all(name in transfer for name in _MOONCAKE):
        return  # vLLM warns, and waits for KV that nobody sends
    wanted = {
        "remote_engine_id": rank.engine_id, "remote_host": settings.host,
        "remote_port": rank.side_channel_port, "remote_cached_tokens": 0,
    }  # fmt: skip
    engine_id = transfer["remote_engine_id"]
    message = {"verb": "register", "engine_id": engine_id, "request_id": key, "wanted": wanted}
    try:
        url = await _engine_url(session, transfer)
        async with session.post(url, json=message, timeout=_LIMIT) as answer:
            if answer.status == 200:
                rank.known_engines.add(engine_id)
                return
            why = await answer.text()
    except (aiohttp.ClientError, TimeoutError, KeyError) as error:
        why = str(error)
    if engine_id not in rank.known_engines:
        rank.counts.failed_transfers += 1
        raise LoadFailed(why)


async def _engine_url(session: aiohttp.ClientSession, transfer: dict[str, Any]) -> str:
    if "remote_bootstrap_addr" not in transfer:
        return f"http://{transfer['remote_host']}:{transfer['remote_port']}/"
    async with session.get(f"{transfer['remote_bootstrap_addr']}/query", timeout=_LIMIT) as answer:
        urls = {one["engine_id"]: one["worker_addr"]["0"]["0"] for one in (await answer.json()).values()}
    return str(urls[transfer["remote_engine_id"]])
