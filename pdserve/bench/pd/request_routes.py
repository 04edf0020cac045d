"""How requests reach a contestant: its URLs in turn, or vLLM's P first and then, with its KV parameters, D."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pdserve.bench.load.endpoint import Endpoint
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.session import get_json
from pdserve.bench.load.timeline import RequestFailure, Timeline
from wire.errors import Unavailable

_PREFILL_HERE: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def nothing() -> None:
    """Do nothing."""


class RequestRoute(Protocol):
    """Sends one request."""

    async def send(
        self, request: LoadRequest, due_s: float | None = None, *, on_first: Callable[[], None] = nothing
    ) -> Timeline:
        """Return its timeline; `on_first` is called at its first piece."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Sends to each endpoint in turn."""

    endpoints: Sequence[Endpoint]
    _turns: Iterator[int] = field(default_factory=itertools.count)

    async def send(
        self, request: LoadRequest, due_s: float | None = None, *, on_first: Callable[[], None] = nothing
    ) -> Timeline:
        """Send to the next endpoint."""
        return await self.endpoints[next(self._turns) % len(self.endpoints)].send(request, due_s, on_first=on_first)


@dataclass(frozen=True, slots=True)
class PairWithoutProxy:
    """vLLM's pair without a proxy: the prompt goes to P for one token, then to D with P's KV parameters."""

    prefill: Endpoint
    decode: Endpoint

    async def send(
        self, request: LoadRequest, due_s: float | None = None, *, on_first: Callable[[], None] = nothing
    ) -> Timeline:
        """Send to both; the request's time starts at P."""
        sent_s = self.prefill.clock()
        body = self.prefill.dialect.body(request) | {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": _PREFILL_HERE,
        }
        del body["stream_options"]
        due_s = sent_s if due_s is None else due_s
        try:
            url = self.prefill.base_url + self.prefill.dialect.path
            ticket = (await get_json(self.prefill.http, url, body)).get("kv_transfer_params")
        except Unavailable as error:
            failure = RequestFailure("P refused", str(error))
            return Timeline(due_s, sent_s, end_s=self.prefill.clock(), failure=failure)
        line = await self.decode.send(request, due_s, more={"kv_transfer_params": ticket}, on_first=on_first)
        return replace(line, sent_s=sent_s)
