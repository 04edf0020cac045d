"""The order of vllm-ascend's MooncakeLayerwiseConnector: decode allocates and reports blocks, then prefill sends KV.

After mooncake_layerwise_connector of vllm-ascend (main, August 2026):
update_state_after_alloc   the dictionary that decode POSTs to the request's metaserver, once
_access_metaserver         any answer is fine; after three failed tries an error is logged, and the request hangs
get_external_request_id    the KV is found by the engine's id without its last 9 characters: both legs need one id
request_finished           prefill answers no reference and holds no blocks
get_finished               only a whole prefill ends decode's wait: neither an aborted nor a failed one does
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp

from testing.vllm_worker.continuation import KvEntry
from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.settings import WorkerSettings

SUFFIX = 9
"""Characters of a request's id that are random."""
_TRIES = 3
_LIMIT = aiohttp.ClientTimeout(total=10)


async def receive_kv(
    settings: WorkerSettings, rank: WorkerRank, session: aiohttp.ClientSession, url: str, request_id: str,
    block_ids: list[int],
) -> list[KvEntry]:  # fmt: skip
    """Report the blocks that are to receive a request's KV, and wait for the KV without a limit."""
    external_id = request_id[:-SUFFIX]
    wanted = _wanted(settings, rank, external_id, block_ids)
    return await rank.receive(external_id, block_ids, partial(_call, session, url, wanted))


async def send_kv(
    session: aiohttp.ClientSession, wanted: dict[str, Any], external_id: str, kv: Sequence[KvEntry]
) -> None:
    """Send the KV of a request to the decode worker that wants it; if that worker is gone, do nothing."""
    message = {
        "verb": "push", "checked": False, "engine_id": wanted["remote_engine_id"],
        "request_id": external_id, "kv": kv[wanted["remote_cached_tokens"] :],
    }  # fmt: skip
    with suppress(aiohttp.ClientError, TimeoutError):
        url = f"http://{wanted['remote_host']}:{wanted['remote_port']}/"
        async with session.post(url, json=message, timeout=_LIMIT):
            pass


def take_kv(rank: WorkerRank, message: dict[str, Any]) -> None:
    """Take the KV that a prefill worker sends, unless the request is gone."""
    arrival = rank.arrivals.get(message["request_id"])
    if arrival is not None and not arrival.done():
        arrival.set_result([(int(token_id), int(salt)) for token_id, salt in message["kv"]])


async def _call(session: aiohttp.ClientSession, url: str, message: dict[str, Any]) -> None:
    for _ in range(_TRIES):
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(url, json=message, timeout=_LIMIT):
                return


def _wanted(
    settings: WorkerSettings, rank: WorkerRank, external_id: str, block_ids: Sequence[int]
) -> dict[str, Any]:  # fmt: skip
    return {
        "token_ids": [],
        "request_id": external_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(block_ids)],
        "remote_block_size": [rank.block_size],
        "remote_engine_id": rank.engine_id,
        "remote_host": settings.side_channel_host or settings.host,
        "remote_port": rank.side_channel_port,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }
