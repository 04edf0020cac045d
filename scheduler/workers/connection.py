"""A worker of another engine as an instance: described by its HTTP routes, with a session that runs prompts by HTTP.

describe   GET /version, /v1/models, /metrics          once per session
session    GET /metrics each second, POST /v1/completions for each sequence (session.py)
"""

import random
import secrets

from scheduler.workers.http import WorkerHttp
from scheduler.workers.load import KvCache, kv_cache, read_load
from scheduler.workers.served_model import read_cards
from scheduler.workers.session import WorkerSession
from wire.messages import OpenSession
from wire.types import PROTOCOL_VERSION, ForeignWorker, InstanceDescription, KvEndpoint, ModelIdentity, Role

_MAX_NUM_SEQS = 1024
_CHUNK = 8192
"""What a worker does not say: prompts and tokens that it may be given at once. It queues what it cannot run yet."""
_UNKNOWN_BLOCKS = KvCache(2**20, 16)


class WorkerConnection:
    """A connection to one worker. Implements wire.connection.Connection."""

    def __init__(self, url: str, *, api_key: str = "", path: str = "prefill_first") -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._path = path
        self._control = WorkerHttp(self._url, api_key=api_key)
        self._cache = _UNKNOWN_BLOCKS
        self._model = ""
        self._description: InstanceDescription | None = None

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Return what the worker's routes say of it. Raises InstanceLost, DeadlineExceeded, Incompatible."""
        await self._control.get("/health", timeout_s)
        version = str((await self._control.get_json("/version", timeout_s)).get("version") or "")
        answer = await self._control.get_json("/v1/models", timeout_s)
        served = read_cards(self._url, answer)
        metrics = await self._control.get("/metrics", timeout_s)
        found = kv_cache(metrics)
        self._cache = found if found.num_blocks and found.block_size else _UNKNOWN_BLOCKS
        self._model = served.names[0]
        engine = f"vLLM {version}"
        host, _, port = self._url.rpartition("//")[2].rpartition(":")
        self._description = InstanceDescription(
            instance_id=f"worker-{secrets.token_hex(4)}",
            epoch=random.SystemRandom().getrandbits(63),
            server_ip="",
            device_ids=(),
            host=host.strip("[]"),
            port=int(port),
            pid=0,
            role=Role.COMBINED,
            table_digest="",
            protocol_version=PROTOCOL_VERSION,
            model=ModelIdentity(served.root, "", ""),
            max_model_len=int(answer["data"][0].get("max_model_len") or 0),
            vocab_size=0,
            dtype="",
            block_size=self._cache.block_size,
            num_blocks=self._cache.num_blocks,
            kv_tensors=(),
            prefill_chunk_size=_CHUNK,
            max_num_seqs=_MAX_NUM_SEQS,
            endpoints=(KvEndpoint(f"the connector of {engine}", self._url),),
            device="",
            worker=ForeignWorker(engine, self._path),
        )
        return self._description

    async def open(self, hello: OpenSession, timeout_s: float) -> WorkerSession:
        """Open a session with the worker that was described."""
        assert self._description is not None, "described first"
        load = read_load(await self._control.get("/metrics", timeout_s), self._cache)
        return WorkerSession(self._description, self._model, self._control, self._cache, load, self._api_key)

    async def close(self) -> None:
        """Close the connections."""
        await self._control.close()
