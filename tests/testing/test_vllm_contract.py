"""Pairs of fake vLLM workers answer as real ones; tests/workers/ has the real ones."""

import asyncio
from typing import Any

import pytest

from testing.engine.fake_model import FakeConfig
from testing.vllm_worker.settings import Connector, WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker
from tests.testing.vllm_contract import PUSH_ROWS, REFUSED, ROWS, Row, refusal, run_row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_the_fake_pair_keeps_the_contract(row: Row) -> None:
    asyncio.run(_on_fakes(row))


@pytest.mark.parametrize("row", PUSH_ROWS, ids=lambda row: row.__name__)
def test_the_fake_push_pair_keeps_the_contract(row: Row) -> None:
    asyncio.run(_on_fakes(row, "nixl-push"))


@pytest.mark.parametrize(("fields", "status", "kind"), REFUSED, ids=lambda value: str(value)[:40])
def test_the_fake_refuses(fields: dict[str, Any], status: int, kind: str) -> None:
    asyncio.run(_on_fakes(refusal(fields, status, kind)))


async def _on_fakes(row: Row, connector: Connector = "nixl") -> None:
    fake = FakeConfig(num_layers=1, step_seconds=0.001)
    lease_s = 0.5 if connector == "nixl-push" else 30.0
    settings = WorkerSettings(fake=fake, connector=connector, lease_s=lease_s)
    prefill, decode = (FakeVllmWorker(settings) for _ in range(2))
    await prefill.start()
    await decode.start()
    try:
        await run_row(row, prefill.url, decode.url)
    finally:
        await decode.stop()
        await prefill.stop()
