"""`pdserve role` on real processes: under load nothing is lost, and each answer is that of the instances it names.

In scripts/test these have the fake engine, whose tokens show which instances gave them; the answers of the real engine
are those of transformers.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest

from engine.oracle import Oracle
from pdserve import cli
from pdserve.admin_client import change_role, connect_admin
from testing.engine.fake_model import FakeConfig, expected_tokens
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster
from tests.cluster.test_ranks import salt
from tests.engine.tiny_models import VOCAB_SIZE
from wire.types import SamplingParams

pytestmark = pytest.mark.cluster

NUM_CLIENTS, NUM_OUTPUTS = 4, 12
WAIT_S = 300.0
MOVED = "decode-1"


class _Clients:
    """Clients that send their own prompts until stopped. Owns what came back, by prompt and ports of instances."""

    def __init__(self, cluster: GuideCluster) -> None:
        self.prompts = [[3 + (17 * n + 5 * at) % 200 for at in range(20 + 13 * n)] for n in range(NUM_CLIENTS)]
        self.answers: list[tuple[int, tuple[int, int], list[int]]] = []
        self.prefilled_by = Counter[int]()
        self._cluster, self._changed, self._stopped = cluster, threading.Condition(), False

    def run(self, number: int) -> None:
        """Send one client's requests. Raises for an answer that is no whole one."""
        body = {
            "model": "tiny", "prompt": self.prompts[number], "max_tokens": NUM_OUTPUTS, "ignore_eos": True,
            "temperature": 0, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True, "include_instances": True},
        }  # fmt: skip
        while not self._stopped:
            reply = self._cluster.client.post("/v1/completions", body)
            assert reply.status == 200, reply.body
            lines = [
                line.removeprefix("data: ") for line in reply.body.decode().splitlines() if line.startswith("data")
            ]
            assert lines[-1] == "[DONE]", lines
            events = [json.loads(line) for line in lines[:-1]]
            tokens = [token for event in events for one in event["choices"] for token in one["token_ids"]]
            with self._changed:
                names = (events[-1]["pdserve"][f"{role}_instance"] for role in ("prefill", "decode"))
                start, rest = (int(name.rpartition(":")[2]) for name in names)
                self.answers.append((number, (start, rest), tokens))
                self.prefilled_by[start] += 1
                self._changed.notify_all()

    def wait_prefilled(self, port: int, before: int) -> None:
        """Return when the instance at this port has prefilled more prompts than before."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.prefilled_by[port] > before, WAIT_S), self.prefilled_by

    def stop(self) -> None:
        """End each client after its current request."""
        self._stopped = True


@pytest.mark.often("fake-40")
@pytest.mark.parametrize(("engine", "num_changes"), [("fake", 40), ("fake", 200), ("transformers", 200)])
def test_changes_under_load_lose_and_change_no_answer(
    engine: str, num_changes: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Path = request.getfixturevalue("fake_model" if engine == "fake" else "tiny_model")
    flags = ("--engine=fake", "--no-enable-prefix-caching") if engine == "fake" else ENGINE_FLAGS
    with GuideCluster(tmp_path, model, prefill=["4"], decode=["6", "7"], flags=flags) as cluster:
        cluster.up()
        cluster.wait_living()
        port, pids = cluster.ports[2], {name: one.pid for name, one in cluster.processes.items()}
        clients, waits = _Clients(cluster), []
        wanted = _fakes(cluster, clients) if engine == "fake" else _transformers(cluster, clients, model)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            running = [pool.submit(clients.run, number) for number in range(NUM_CLIENTS)]
            try:
                for number in range(num_changes):
                    role, before = ("prefill", "decode")[number % 2], clients.prefilled_by[port]
                    began = time.monotonic()
                    with connect_admin(cluster.client.base_url) as connection:
                        changed = change_role(connection, MOVED, role)
                    assert changed == {"before": ("decode", "prefill")[number % 2], "role": role, "epoch": number + 1}
                    if role == "prefill":
                        clients.wait_prefilled(port, before)
                        waits.append(time.monotonic() - began)
            finally:
                clients.stop()
            for one in running:
                one.result(WAIT_S)
        with capsys.disabled():
            p50, p95 = (1000 * sorted(waits)[int(share * len(waits))] for share in (0.5, 0.95))
            print(f"\nfrom the command to an answer prefilled there: p50 {p50:.0f} ms, p95 {p95:.0f} ms")

        assert all(tokens == wanted[number, pair] for number, pair, tokens in clients.answers)
        assert {name: one.pid for name, one in cluster.processes.items()} == pids
        assert [sample.value for sample in cluster.gauge("pdserve_prompts_retried_total")] == [0]
        assert cli.main(["role", MOVED, "combined", "--url", cluster.client.base_url]) == 0
        assert capsys.readouterr().out == f"{MOVED}: decode -> combined\n"
        assert cli.main(["role", MOVED, "prefill", "--url", cluster.client.base_url]) == 0
        assert cli.main(["role", "decode-0", "prefill", "--url", cluster.client.base_url]) == 2
        assert "decode-0 as prefill would leave no path" in capsys.readouterr().err
        cluster.wait_idle()


def _pairs(cluster: GuideCluster) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    """Yield the names and ports of each two instances."""
    return zip(permutations(cluster.names, 2), permutations(cluster.ports, 2), strict=True)


def _fakes(cluster: GuideCluster, clients: _Clients) -> dict[tuple[int, tuple[int, int]], list[int]]:
    """Return what each pair of fake engines answers to each client."""
    params = SamplingParams(NUM_OUTPUTS, temperature=0)
    return {
        (number, ports): list(
            expected_tokens(
                FakeConfig(vocab_size=VOCAB_SIZE), prompt, params, count=NUM_OUTPUTS,
                salts=[salt(cluster, start)] * len(prompt) + [salt(cluster, rest)],
            )
        )
        for (start, rest), ports in _pairs(cluster)
        for number, prompt in enumerate(clients.prompts)
    }  # fmt: skip


def _transformers(
    cluster: GuideCluster, clients: _Clients, model: Path
) -> dict[tuple[int, tuple[int, int]], list[int]]:
    """Return the answers of transformers, the same for each pair."""
    wanted = Oracle(model, "float32").generate_greedy(clients.prompts, NUM_OUTPUTS, ignore_eos=True)
    return {(number, ports): tokens for _, ports in _pairs(cluster) for number, tokens in enumerate(wanted)}
