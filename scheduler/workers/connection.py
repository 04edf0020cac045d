"""A worker of another engine as an instance: its HTTP routes describe it, and a session runs prompts over HTTP.

describe   GET /version, /v1/models, /metrics          once per session
session    GET /metrics each second, POST /v1/completions for each sequence (session.py)
"""

import os
import random
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from scheduler.membership.worker_ranks import split_address
from scheduler.workers.connectors import (
    AUTO,
    BOOTSTRAP_PORT,
    DECODE_FIRST,
    DEFAULT_BOOTSTRAP_PORT,
    MOONCAKE,
    NIXL_PUSH,
    PATHS,
)
from scheduler.workers.engine_ids import EngineIds
from scheduler.workers.http import WorkerHttp
from scheduler.workers.load import KvCache, WorkerLoad, engine_labels, kv_cache, read_load, started_at
from scheduler.workers.served_model import read_cards
from scheduler.workers.session import WorkerSession
from scheduler.workers.transfers import HeldKv, MooncakeKv, PushedKv, Transfer
from wire.description import ForeignWorker, InstanceDescription, ModelIdentity
from wire.errors import ConfigError, Incompatible, InstanceLost
from wire.messages import OpenSession
from wire.types import PROTOCOL_VERSION, KvEndpoint, Role

if TYPE_CHECKING:
    from scheduler.workers.callbacks import Callbacks, Expect

_RANK = "X-data-parallel-rank"
"""Counts the worker's own ranks from 0, even if the labels of its metrics begin with a higher number."""
_MAX_NUM_SEQS = 1024
_CHUNK = 8192
"""Limits on prompts and tokens sent to a worker, which reports none. It queues what it cannot run yet."""
_UNKNOWN_BLOCKS = KvCache(2**20, 16)
_BOOTSTRAP_S = 5.0
_NIXL = b"vllm:nixl_"
"""Prefix of the counters of a worker with a NIXL connector."""


class WorkerConnection:
    """A connection to one data-parallel rank of a worker. Implements wire.connection.Connection."""

    def __init__(
        self, address: str, *, api_key: str = "", connector: str = AUTO, callbacks: "Callbacks | None" = None,
        bootstrap_port: int | None = None, check: Callable[[], Awaitable[None]] | None = None,
        engine_ids: EngineIds | None = None,
    ) -> None:  # fmt: skip
        """`callbacks` are needed if the connector's decode workers get requests first; `check` raises Incompatible for
        a worker that must not be used. The connections to all workers share `engine_ids`.

        `bootstrap_port` is that of a prefill worker with MooncakeConnector; its default is, as in the worker, the
        variable VLLM_MOONCAKE_BOOTSTRAP_PORT. Raises ConfigError.
        """
        self._address, self._engine_ids = address, engine_ids
        self._url, self._rank = split_address(address)
        self._api_key = api_key
        self._connector = connector
        self._path = PATHS[connector]
        self._bootstrap = _bootstrap_of(self._url, bootstrap_port) if connector == MOONCAKE else None
        self._callbacks = callbacks
        self._check = check
        self._expect: Expect | None = None
        self._control = WorkerHttp(self._url, api_key=api_key)
        self._cache = _UNKNOWN_BLOCKS
        self._engines: list[bytes] = []
        self._started_at = b""
        self._model = ""
        self._description: InstanceDescription | None = None

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Return the worker's description from its routes. Raises InstanceLost, DeadlineExceeded, Incompatible.

        A worker whose metrics have no engine labels has one rank.
        """
        if self._check is not None:
            await self._check()
        await self._control.get("/health", timeout_s)
        version = str((await self._control.get_json("/version", timeout_s)).get("version") or "")
        served = read_cards(self._url, await self._control.get_json("/v1/models", timeout_s))
        metrics = await self._control.get("/metrics", timeout_s)
        self._engines, self._started_at = engine_labels(metrics), started_at(metrics)
        if self._connector == MOONCAKE and _NIXL in metrics:  # NIXL's decode crashes on requests without blocks
            raise Incompatible(f"{self._url} runs a NIXL connector, not MooncakeConnector: set another --connector")
        num_ranks = max(1, len(self._engines))
        if self._rank >= num_ranks:
            raise InstanceLost(
                f"{self._url} has no data-parallel rank {self._rank}: its number of ranks is {num_ranks}"
            )
        found = kv_cache(metrics, self._engine)
        self._cache = found if found.num_blocks and found.block_size else _UNKNOWN_BLOCKS
        self._model = served.names[0]
        engine = f"vLLM {version}"
        host, _, port = self._url.rpartition("//")[2].rpartition(":")
        if self._path == DECODE_FIRST and self._callbacks is not None:
            self._expect = await self._callbacks.from_host(host.strip("[]"))
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
            max_model_len=served.max_model_len,
            vocab_size=0,
            dtype="",
            block_size=self._cache.block_size,
            num_blocks=self._cache.num_blocks,
            kv_tensors=(),
            prefill_chunk_size=_CHUNK,
            max_num_seqs=_MAX_NUM_SEQS,
            endpoints=(KvEndpoint(f"the connector of {engine}", self._url),),
            device="",
            worker=ForeignWorker(engine, self._path, num_ranks),
        )
        return self._description

    async def open(self, hello: OpenSession, timeout_s: float) -> WorkerSession:
        """Open a session with the worker that was described."""
        assert self._description is not None, "described first"
        load = (await self._read_load(timeout_s)).snapshot
        headers = {_RANK: str(self._rank)} if len(self._engines) > 1 else {}
        http = WorkerHttp(self._url, api_key=self._api_key, headers=headers)
        session = WorkerSession(
            self._description, self._model, http, self._read_load, load, self._expect, self._transfer(),
            self._engine_ids, self._address,
        )  # fmt: skip
        self._control.on_idle_lost = http.on_idle_lost = session.look_now
        return session

    async def close(self) -> None:
        """Close the connections."""
        await self._control.close()
        if self._bootstrap is not None:
            await self._bootstrap.close()

    def _transfer(self) -> Transfer:
        """Return the way that KV is handed off from this worker, for one session."""
        if self._bootstrap is not None:
            query = partial(self._bootstrap.get_json, "/query", _BOOTSTRAP_S)
            return MooncakeKv(self._bootstrap.url, self._rank, query)
        return PushedKv() if self._connector == NIXL_PUSH else HeldKv()

    @property
    def _engine(self) -> bytes:
        """The label of this rank's engine in the worker's metrics; empty if they have none."""
        return self._engines[self._rank] if self._engines else b""

    async def _read_load(self, timeout_s: float) -> WorkerLoad:
        metrics = await self._control.get("/metrics", timeout_s)
        if self._engines != engine_labels(metrics) or self._started_at != started_at(metrics):
            raise InstanceLost(f"{self._url} is now another process: its start time or its ranks have changed")
        return read_load(metrics, self._cache, self._engine)


def _bootstrap_of(url: str, port: int | None) -> WorkerHttp:
    """Return the HTTP client of the bootstrap server on a worker's host. Raises ConfigError."""
    text = str(port or os.environ.get(BOOTSTRAP_PORT) or DEFAULT_BOOTSTRAP_PORT)
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"{BOOTSTRAP_PORT}={text} is not a port")
    return WorkerHttp(f"http:{url.partition(':')[2].rpartition(':')[0]}:{text}")
