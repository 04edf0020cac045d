"""The servers of LLM: an engine in this process, a running cluster, or its own prefill/decode pair.

open_local    inner_app, without a socket
open_cluster  the URL of a running server
open_pair     `pdserve up` as a child, with its own port, API key and folder; it dies with us
"""

import asyncio
import contextlib
import functools
import importlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from batch.backend import NO_HEADERS, Answer, BatchBackend
from batch.inflight import Inflight
from pdserve.client import Client
from pdserve.offline.http_api import HttpApi
from pdserve.ports import free_ports
from pdserve.process_plan import ProcessPlan
from pdserve.processes import KILL_WAIT_S, POLL_S, Child, stop
from pdserve.readiness import check_ready
from pdserve.run_folder import last_lines
from scheduler.config import SchedulerConfig
from wire.errors import ConfigError, DeadlineExceeded, Unavailable

_HOST = "127.0.0.1"
_LAST_LINES = 8
_WRONG_INPUT = 2
_STOP_S = 45.0
_CLUSTER_ANSWER_S = 3600.0
_OWN_ANSWER_S = 86_400.0
_MAX_CONNECTIONS = 512  # to our own pair: a process may open about a thousand files
_LOCAL_RETRY_S = 600.0
_FIRST_RETRY_S = 5.0  # a mistyped URL must fail soon


@contextlib.asynccontextmanager
async def open_local(config: SchedulerConfig) -> AsyncIterator[HttpApi]:
    """Load the model into this process. Raises ConfigError."""
    from batch.app_backend import AppBackend
    from pdserve.inner_app import inner_app
    from pdserve.offline.keywords import as_keywords

    async with contextlib.AsyncExitStack() as stack:
        try:
            app = await stack.enter_async_context(inner_app(config.engine, config.options))
        except ConfigError as error:
            raise ConfigError(as_keywords(str(error))) from error
        _import_tabulate()
        yield await _open_api(AppBackend(app), "", _LOCAL_RETRY_S)


def _import_tabulate() -> None:
    """Import tabulate if torch is loaded, so that an uncaught Ctrl-C ends a script by SIGINT, with the status 130.

    CPython records the Ctrl-C in a flag, which any later eval of a string clears. torch's exit handler imports
    tabulate, if installed, whose namedtuples use eval: the status would be 1.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")


@contextlib.asynccontextmanager
async def open_cluster(
    url: str, model: str, api_key: str | None, *, connections: int, retry_for_s: float,
    timeout_s: float = _CLUSTER_ANSWER_S,
) -> AsyncIterator[HttpApi]:  # fmt: skip
    """Connect to a running server. Raises ConfigError if it lacks the model, Unavailable if it does not respond."""
    from batch.url_backend import UrlBackend

    async with UrlBackend(url, api_key, connections=connections, timeout_s=timeout_s) as backend:
        yield await _open_api(AdaptiveBackend(backend, connections), model, retry_for_s)


@contextlib.asynccontextmanager
async def open_pair(
    arguments: Sequence[str], prefill: int, decode: int, *, connections: int, startup_timeout_s: float
) -> AsyncIterator[HttpApi]:
    """Start a cluster on this machine. Raises ConfigError or Unavailable with its last log lines if it fails."""
    key, (port,) = secrets.token_urlsafe(24), free_ports(1, _HOST)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-llm-"))
    flags = ("--host", _HOST, "--port", str(port), "--prefill", str(prefill), "--decode", str(decode))
    command = (sys.executable, "-P", "-m", "pdserve.offline.pair_process", str(folder), *flags, *arguments)
    plan = ProcessPlan("cluster", "scheduler", f"{_HOST}:{port}", command, {"PDSERVE_API_KEY": key})
    url = f"http://{_HOST}:{port}"
    try:
        # This thread must outlive the child: to the kernel it is the parent.
        child = Child(plan, folder / "cluster.log", os.environ)
        try:
            await _until_ready(child, Client(url), startup_timeout_s)
            async with open_cluster(
                url, "", key, connections=min(connections, _MAX_CONNECTIONS), retry_for_s=_LOCAL_RETRY_S,
                timeout_s=_OWN_ANSWER_S,
            ) as api:  # fmt: skip
                yield api
        finally:
            _end(child)  # blocking is fine: nothing else runs on this thread now
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(child: Child) -> None:
    """Stop the child and reap it, which is possible only after its last thread has ended."""
    stop([child.record], scheduler_grace_s=_STOP_S)
    deadline = time.monotonic() + KILL_WAIT_S
    while child.ended() is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)


async def _until_ready(child: Child, client: Client, timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (await asyncio.to_thread(check_ready, client))[0]:
        if child.ended() is not None:
            lines = "\n  ".join(last_lines(Path(child.record.log), _LAST_LINES))
            kind = ConfigError if child.exit_status == _WRONG_INPUT else Unavailable
            raise kind(f"the prefill/decode pair did not start; its last lines:\n  {lines}")
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(f"the prefill/decode pair is not ready after {timeout_s:g} s")
        await asyncio.sleep(POLL_S)


class AdaptiveBackend:
    """A BatchBackend that limits the requests in flight to `maximum`, and to fewer while the server is busy."""

    def __init__(self, backend: BatchBackend, maximum: int) -> None:
        self._backend = backend
        self._inflight = Inflight(maximum)

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Return the answer. Raises what the wrapped backend raises."""
        return await self._inflight.run(functools.partial(self._backend.send, method, path, body, headers))


async def _open_api(backend: BatchBackend, model: str, retry_for_s: float) -> HttpApi:
    api = HttpApi(backend, retry_for_s=_FIRST_RETRY_S)
    await api.choose(model)
    api.retry_for_s = retry_for_s
    return api


Opened = AbstractAsyncContextManager[HttpApi]
