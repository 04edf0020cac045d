"""A client cannot choose where KV goes, by field or header; what is refused leaves nothing behind."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flags.options import EngineOptions
from scheduler.api.refusals import TRANSFER_FIELDS
from scheduler.app import build_app
from scheduler.app_context import AppContext, ReadyReport
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.observability.metrics import Metrics
from scheduler.tokens import Tokens
from simulation.instance import SimulatedInstance
from simulation.session import SimulatedSession
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import InvalidRequest
from wire.messages import Command, Prefill, Reserve

SOMEWHERE = "10.0.0.9"
VALUES: tuple[Any, ...] = (
    None, True, -1, 2**31, 2**63, "", f"{SOMEWHERE}:1", [], [SOMEWHERE], {}, {"do_remote_prefill": True},
    {"remote_host": SOMEWHERE, "remote_port": 1}, {"remote_block_ids": [2**31], "tp_size": 2**31},
)  # fmt: skip
_connects: list[object] = []
_watching = [False]


def _note_connect(event: str, args: tuple[object, ...]) -> None:
    if event == "socket.connect" and _watching[0]:
        _connects.append(args[1])


sys.addaudithook(_note_connect)  # for the life of the process; silent unless a test watches


@asynccontextmanager
async def served(model_folder: Path, tokens: Tokens) -> AsyncIterator[tuple[httpx.AsyncClient, FakeCluster, str]]:
    """The HTTP API over a control plane and two fake instances; no connection may be made meanwhile."""
    cluster = FakeCluster("PD", vocab_size=384)
    config = SchedulerConfig(EngineOptions(model=str(model_folder)), SchedulerOptions())
    async with cluster.serving():
        context = AppContext(config, cluster.control.dispatch, tokens, Metrics(), lambda: ReadyReport(True))
        transport = httpx.ASGITransport(build_app(context), raise_app_exceptions=False)
        dials = len(cluster.network.dials)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            _connects.clear()
            _watching[0] = True
            try:
                yield client, cluster, config.engine.served_names()[0]
            finally:
                _watching[0] = False
        assert _connects == []
        assert len(cluster.network.dials) == dials


@pytest.mark.anyio
async def test_every_transfer_field_with_any_value_is_400_by_name(model_folder: Path, tokens: Tokens) -> None:
    async with served(model_folder, tokens) as (client, cluster, model):
        for path, base in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            for number, name in enumerate(sorted(TRANSFER_FIELDS)):
                for value in VALUES if number < 2 else VALUES[number % len(VALUES) :][:1]:
                    answer = await client.post(path, json={"model": model, **base, name: value})

                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
        assert not any(isinstance(command, Reserve) for one in cluster.instances for command in one.commands)
        assert cluster.control.dispatch.ledger.received == 0


@pytest.mark.parametrize(
    ("hidden", "status"),
    [("vllm_xargs", 400), ("nvext", 200), ("extra_body", 200), ("metadata", 200), ("unheard_of", 200)],
)
@pytest.mark.anyio
async def test_transfer_fields_hidden_deeper_are_refused_or_never_read(
    model_folder: Path, tokens: Tokens, hidden: str, status: int
) -> None:
    inside = {"kv_transfer_params": {"remote_host": SOMEWHERE, "remote_port": 1}, "bootstrap_host": SOMEWHERE}
    async with served(model_folder, tokens) as (client, cluster, model):
        body = {"model": model, "prompt": "hello", "max_tokens": 4, hidden: inside}
        answer = await client.post("/v1/completions", json=body)

        assert answer.status_code == status, answer.text
        assert SOMEWHERE not in commands_of(cluster)
        assert cluster.blocks_used == [0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "x-request-id", "x-prefiller-host-port", "x-data-parallel-rank", "x-kv-transfer-params", "x-session-id",
        "x-forwarded-for", "traceparent",
    ],
)  # fmt: skip
@pytest.mark.anyio
async def test_addresses_in_headers_reach_no_instance(model_folder: Path, tokens: Tokens, name: str) -> None:
    address = f"___prefill_addr_{SOMEWHERE}:1___decode_addr_{SOMEWHERE}:2_"
    async with served(model_folder, tokens) as (client, cluster, model):
        body = {"model": model, "prompt": "hello", "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body, headers={name: address})

        assert answer.status_code == 200
        assert SOMEWHERE not in commands_of(cluster)
        reserve = next(c for c in cluster.instances[1].commands if isinstance(c, Reserve))
        prefill = next(c for c in cluster.instances[0].commands if isinstance(c, Prefill))
        assert reserve.prompt.prompt_id == prefill.prompt.prompt_id
        assert prefill.ticket.instance_id == "decode-1"


def commands_of(cluster: FakeCluster) -> str:
    """Return all commands that the instances received."""
    return repr([command for one in cluster.instances for command in one.commands])


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "best_of", "seed", "top_k", "stop_token_ids"])
@pytest.mark.parametrize("value", [-5, 2**31, 2**63, 2**70, 1.5, "7", True])
@pytest.mark.anyio
async def test_integers_no_engine_accepts_are_400_or_a_plain_answer(
    model_folder: Path, tokens: Tokens, name: str, value: Any
) -> None:
    """An invalid value is refused before any instance receives it."""
    async with served(model_folder, tokens) as (client, cluster, model):
        body = {"model": model, "prompt": "hello", "max_tokens": 4, name: [value] if name.endswith("ids") else value}
        answer = await client.post("/v1/completions", json=body)

        bounds = {"seed": (-(2**63), 2**63 - 1), "top_k": (-1, 2**70)}  # a larger top_k means the whole vocabulary
        lowest, highest = bounds.get(name, (1, 0))
        allowed = type(value) is int and lowest <= value <= highest
        assert answer.status_code == (200 if allowed else 400), answer.text
        assert allowed or cluster.control.dispatch.ledger.received == 0


@pytest.mark.anyio
async def test_an_empty_prompt_refuses_the_whole_request(model_folder: Path, tokens: Tokens) -> None:
    async with served(model_folder, tokens) as (client, cluster, model):
        mixed = await client.post("/v1/completions", json={"model": model, "prompt": ["a", "a" * 300], "max_tokens": 2})
        empty = await client.post("/v1/completions", json={"model": model, "prompt": ["a", "a" * 300, ""]})

        assert (mixed.status_code, len(mixed.json()["choices"])) == (200, 2)
        assert empty.status_code == 400
        await until(lambda: cluster.blocks_used == [0, 0])


@virtual
async def test_every_prompt_has_its_own_ticket_and_leaves_nothing() -> None:
    async with FakeCluster("PPDD").serving() as cluster:
        prompts = [tuple(range(length)) for length in (1, 17, 40, 3)]
        readers = [
            asyncio.create_task(collect(cluster.control.dispatch, request(*prompts, n=2, limits_s=(999, 999))))
            for _ in range(100)
        ]
        await asyncio.wait(readers)

        tickets = [c.ticket for one in cluster.instances for c in one.commands if isinstance(c, Prefill)]
        assert len(tickets) == 400
        assert len({(ticket.instance_id, ticket.ticket_id) for ticket in tickets}) == 400
        assert all(len(reader.result().finishes) == 8 for reader in readers)
        assert cluster.blocks_used == [0, 0, 0, 0]


class Rejecting(SimulatedInstance):
    """Refuses every prompt for prefill whose first token id is 9."""

    def _handle(self, session: SimulatedSession, command: Command) -> None:
        if isinstance(command, Prefill) and command.prompt.token_ids[0] == 9:
            self._refuse(session, command.prompt.prompt_id, "InvalidRequest", "set to reject")
        else:
            super()._handle(session, command)


@virtual
async def test_a_thousand_rejected_requests_do_not_slow_the_next() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = Rejecting
    async with cluster.serving():
        dispatch, loop = cluster.control.dispatch, asyncio.get_running_loop()

        async def good() -> float:
            began = loop.time()
            assert (await collect(dispatch, request((5, 6)))).tokens[0, 0] == expected((5, 6), 4)
            return loop.time() - began

        before = await good()
        for _ in range(1000):
            with pytest.raises(InvalidRequest, match="set to reject"):
                await collect(dispatch, request((9, *range(40))))
        after = await good()

        assert after == pytest.approx(before)
        assert cluster.blocks_used == [0, 0]
        assert (dispatch.ledger.failed, dispatch.ledger.completed) == (1000, 2)
