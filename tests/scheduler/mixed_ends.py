"""Requests over the whole HTTP API with every possible outcome, and a check that they leave nothing behind."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from flags.options import EngineOptions
from scheduler.api.answer_writer import Headers
from scheduler.app import build_app
from scheduler.app_context import AppContext
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.http.exchange import HttpExchange
from scheduler.http.keys import Keys
from scheduler.instances import Instance
from scheduler.observability.metrics import Metrics
from scheduler.serving import report
from scheduler.tokens import Tokens
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.worker_cluster import WorkerCluster

KEYS = ("one", "two", "three")


class Pipe:
    """A transport that only records what is written to it."""

    def __init__(self) -> None:
        self.written, self.aborted = bytearray(), False

    def write(self, content: bytes) -> None:
        self.written += content

    def abort(self) -> None:
        self.aborted = True


def exchange_for(path: str, headers: Headers) -> tuple[HttpExchange, Pipe]:
    """Return the exchange of a POST request over a connection of its own."""
    transport: Any = (pipe := Pipe())
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "http_version": "1.1", "scheme": "http", "server": None, "client": None,
        "headers": headers, "state": {},
    }  # fmt: skip
    exchange = HttpExchange(scope, transport, [], lambda: None, lambda: None, keep_alive=True, expects=False)
    scope["state"]["exchange"] = exchange
    return exchange, pipe


@dataclass(frozen=True)
class Asked:
    """One request in progress."""

    pipe: Pipe
    exchange: HttpExchange
    answering: "asyncio.Task[None]"

    @property
    def outcome(self) -> str:
        """The outcome: a status, or how the stream ended."""
        if self.exchange.gone:
            return "gone"
        if b"text/event-stream" not in self.pipe.written:
            return self.pipe.written[9:12].decode()
        if b"data: [DONE]" in self.pipe.written:
            return "streamed"
        return "cut short" if self.pipe.aborted else "failed in the stream"


@dataclass
class Clients:
    """Clients of a scheduler over `cluster`; `outcomes` counts how requests ended.

    `comments_s`: see scheduler/api/piece_writer.py.
    """

    cluster: FakeCluster | WorkerCluster
    tokens: Tokens
    rng: random.Random
    comments_s: float | None = None
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        control = self.cluster.control
        options = SchedulerOptions(
            first_token_timeout=6.0, stall_timeout=2.0, sse_keep_alive_interval=self.comments_s
        )  # fmt: skip
        self.model = "tiny"
        config = SchedulerConfig(EngineOptions(model=self.model), options)
        self.context = AppContext(
            config, control.dispatch, self.tokens, Metrics(control.view), lambda: report(control), keys=Keys(KEYS)
        )
        self.app: ASGIApp = build_app(self.context)

    async def ask(self) -> None:
        """Send one request of a random kind from a random client, and wait for its end."""
        requested = self.begin(*self._some_request(), self.rng.choice((*KEYS, "none")))
        await self._behave(requested.exchange, requested.answering)
        await requested.answering
        self.outcomes[requested.outcome] += 1

    def begin(self, path: str, body: Mapping[str, Any], key: str) -> "Asked":
        """Send a request over its own connection."""
        exchange, pipe = exchange_for(path, [(b"authorization", b"Bearer " + key.encode())])
        exchange.feed(json.dumps({"model": self.model, **body}).encode())
        exchange.complete_body()
        return Asked(pipe, exchange, asyncio.create_task(exchange.run(self.app)))

    async def _behave(self, exchange: HttpExchange, answering: "asyncio.Task[None]") -> None:
        """Read slowly, disconnect, or wait."""
        what = self.rng.random()
        if what < 0.3:
            for _ in range(self.rng.randrange(4)):  # a moment between two turns of the loop
                await asyncio.sleep(0)
            await asyncio.wait({answering}, timeout=self.rng.choice((0.0, 0.01, 0.1, 1.0)) * self.rng.random())
            exchange.leave("the client went away")
        elif what < 0.5:
            for _ in range(10):
                exchange.pause()
                await asyncio.wait({answering}, timeout=self.rng.random() / 10)
                exchange.resume()
                await asyncio.wait({answering}, timeout=self.rng.random() / 10)

    def _some_request(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        prompts = [self._prompt() for _ in range(rng.choice((1, 1, 1, 3)))]
        if rng.random() < 0.15:
            return "/v1/embeddings", {"input": prompts}
        body: dict[str, Any] = {
            "prompt": prompts, "max_tokens": rng.choice((1, 5, 20, 60)),
            "n": rng.choice((1, 1, 2)), "stream": rng.random() < 0.6, "priority": rng.choice((0, 0, -1, 5)),
            "temperature": 0.7,
        }  # fmt: skip
        if rng.random() < 0.3:
            body["stop"] = ["a", "e", "the"]
        if rng.random() < 0.05:
            body["max_tokens"] = -1  # refused
        if rng.random() < 0.05:
            body |= {"max_tokens": 300, "n": 8}  # more than a pool can hold
        return "/v1/completions", body

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(300) for _ in range(self.rng.randrange(1, 120))]


def left_behind(cluster: FakeCluster) -> dict[str, object]:
    """Return what dispatch, queue, budget and ledgers of living instances hold: nothing after the last one."""
    dispatch = cluster.control.dispatch
    queue, room, retries = dispatch.admission._queue, dispatch.admission._room, dispatch.retries
    held: dict[str, object] = {
        "in flight": dispatch.ledger.inflight,
        "running": dispatch._running,
        "queued": len(queue),
        "bands": queue._bands,
        "priorities": queue._priorities,
        "queued prompts": room.num_prompts,
        "queued tokens": room.num_tokens,
        "prompts of keys": {key: count for key, count in room._prompts.items() if count},
        "tokens of keys": {key: count for key, count in room._tokens.items() if count},
        "without room": dispatch.admission._without_room,
        "staying": dispatch.admission._num_prefill_only,
        "retries under way": retries.num_under_way,
        "retries waiting": retries.num_waiting,
        "blocks": sum(cluster.blocks_used),
    }
    for instance in cluster.control.registry.living():
        held |= {f"{instance}: {name}": value for name, value in _ledger_values(instance).items()}
    return {name: value for name, value in held.items() if value}


def _ledger_values(instance: Instance) -> dict[str, object]:
    ledger = instance.in_flight
    names = ("_tokens", "_unseen", "_handed_blocks", "_booked_blocks", "_sequences")
    values = {name: getattr(ledger, name) for name in (*names, "_prompts", "_held", "_num_snapshots", "_reserved")}
    return {
        **values, "prompts": instance._prompts, "users of prefixes": ledger._prefixes._users,
        "sequences": ledger.sequences, "outstanding": ledger.outstanding_tokens,
        "blocks not free": ledger.load.blocks_total - ledger.blocks_free,
    }  # fmt: skip
