"""Log probabilities of the prompt over workers: for every connector, and for models that keep a state."""

import dataclasses

import pytest

from testing.engine.fake_model import expected_tokens
from testing.vllm_worker.settings import Connector
from tests.scheduler.fake_cluster import request
from tests.scheduler.worker_cluster import SETTINGS, WorkerCluster
from wire.types import Role

PROMPT = tuple(range(10, 60))
LENGTH = 24
CONNECTORS: tuple[Connector, ...] = ("nixl", "ascend-layerwise", "nixl-push", "mooncake")


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("is_hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.combinations(2)
@pytest.mark.anyio
async def test_scores_change_no_token(is_hybrid: bool, connector: Connector, version: str) -> None:
    settings = dataclasses.replace(SETTINGS, is_hybrid=is_hybrid, connector=connector, version=version)
    cluster = WorkerCluster("PD", settings)
    if (connector, version) == ("nixl-push", "0.26.0"):
        cluster.connector = "auto"  # the connector of these versions is served in this order only
    async with cluster.serving():
        wanted = request(PROMPT, temperature=0.0, max_tokens=LENGTH, prompt_logprobs=1)
        answer = await cluster.answer(wanted)

        right = list(expected_tokens(SETTINGS.fake, PROMPT, wanted.params, count=LENGTH, salts=[0]))
        assert answer.tokens == {(0, 0): right}
        assert [one is None for one in answer.scored[0]] == [True] + [False] * (len(PROMPT) - 1)
        assert (answer.done[0].tries, answer.done[0].times.cached_tokens) == (1, 0)
        assert cluster.kv_usage(Role.PREFILL) == 0
