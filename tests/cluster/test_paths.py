"""`--path auto` over real processes: both local paths give transformers' tokens."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.oracle import Oracle
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.cluster

NUM_OUTPUTS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[GuideCluster]:
    """1P1D: P's pool has room for 250 tokens at most, D decodes one sequence at a time."""
    folder, flags = tmp_path_factory.mktemp("paths"), (*ENGINE_FLAGS, "--path=auto")
    with GuideCluster(folder, tiny_model, prefill=["4"], decode=["6"], flags=flags) as cluster:
        cluster.start("prefill-0", flags=("--kv-cache-memory=128KiB",))
        cluster.start("decode-0", flags=("--max-num-seqs=1",))
        cluster.start("scheduler", flags=("--enable-prompt-tokens-details",))
        cluster.wait_ready()
        yield cluster


@pytest.mark.parametrize(("length", "n"), [(300, 1), (20, 2)], ids=["decode alone", "prefill alone"])
def test_a_prompt_that_one_instance_cannot_take_goes_to_the_other(
    cluster: GuideCluster, tiny_model: Path, length: int, n: int
) -> None:
    prompt = [5 + 7 * i % 200 for i in range(length)]
    wanted = Oracle(tiny_model, "float32").generate_greedy([prompt], NUM_OUTPUTS, ignore_eos=True)
    body = {"model": "tiny", "max_tokens": NUM_OUTPUTS, "ignore_eos": True, "top_p": 1e-6, "return_token_ids": True}
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:
        for given in ({"prompt": "hello"}, {"prompt": prompt, "n": n}):  # the first so that all steps are measured
            answer = http.post("/v1/completions", json=body | given)
            assert answer.status_code == 200, answer.text

    assert answer.headers["x-pdserve-path"] == "local"
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == n * wanted
    cluster.wait_idle()


def test_the_next_turn_reuses_the_answer_where_it_was_generated(cluster: GuideCluster, tiny_model: Path) -> None:
    prompt = [6 + 7 * i % 200 for i in range(300)]  # which only the decode instance takes
    body = {"model": "tiny", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:
        turn = http.post("/v1/completions", json=body | {"prompt": prompt}).json()
        whole = [*prompt, *turn["choices"][0]["token_ids"], *range(20, 30)]
        after = http.post("/v1/completions", json=body | {"prompt": whole}).json()

    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == (300 + 39) // 16 * 16
    oracle = Oracle(tiny_model, "float32").generate_greedy([whole], 40, ignore_eos=True)
    assert [after["choices"][0]["token_ids"]] == oracle
