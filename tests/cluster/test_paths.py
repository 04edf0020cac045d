"""`--path auto` over real processes: a local path gives the tokens of the instance that runs it, and transformers'."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import httpx
import pytest

from engine.oracle import Oracle
from testing.engine.fake_model import FakeConfig, expected_tokens
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster
from tests.cluster.test_ranks import salt
from tests.engine.tiny_models import VOCAB_SIZE
from wire.types import SamplingParams

pytestmark = pytest.mark.cluster

NUM_OUTPUTS = 12


@pytest.fixture(scope="module", params=["fake", pytest.param("transformers", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuideCluster]:
    """1P1D: P's pool has room for 250 tokens at most, D decodes one sequence at a time."""
    is_fake = request.param == "fake"
    model = request.getfixturevalue("fake_model" if is_fake else "tiny_model")
    flags = ("--path=auto", *(("--engine=fake", "--block-size=16") if is_fake else ENGINE_FLAGS))
    pool = "32KiB" if is_fake else "128KiB"
    folder = tmp_path_factory.mktemp("paths")
    with GuideCluster(folder, model, prefill=["4"], decode=["6"], flags=flags) as cluster:
        cluster.start("prefill-0", flags=(f"--kv-cache-memory={pool}",))
        cluster.start("decode-0", flags=("--max-num-seqs=1",))
        classes = ("quick:gap=0.02", "never:ttft=1e-6")
        cluster.start("scheduler", flags=("--enable-prompt-tokens-details", "--request-classes", *classes))
        cluster.wait_ready()
        yield cluster


@pytest.mark.parametrize(("length", "n", "alone"), [(300, 1, "decode-0"), (20, 2, "prefill-0")])
def test_a_prompt_that_one_instance_cannot_take_goes_to_the_other(
    cluster: GuideCluster, request: pytest.FixtureRequest, length: int, n: int, alone: str
) -> None:
    prompt = [5 + 7 * i % 200 for i in range(length)]
    body = {"model": "tiny", "max_tokens": NUM_OUTPUTS, "ignore_eos": True, "return_token_ids": True}
    body |= {"seed": 0, "top_p": 1e-6}  # greedy on a real engine
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:
        for given in ({"prompt": "hello"}, {"prompt": prompt, "n": n}):  # the first so that all steps are measured
            answer = http.post("/v1/completions", json=body | given)
            assert answer.status_code == 200, answer.text

    assert answer.headers["x-pdserve-path"] == "local"
    wanted = _wanted(cluster, request, prompt, NUM_OUTPUTS, alone, n)
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == wanted
    cluster.wait_idle()


def test_the_next_turn_reuses_the_answer_where_it_was_generated(
    cluster: GuideCluster, request: pytest.FixtureRequest
) -> None:
    prompt = [6 + 7 * i % 200 for i in range(300)]  # which only the decode instance takes
    body = {"model": "tiny", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    body |= {"seed": 0, "top_p": 1e-6}
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:
        turn = http.post("/v1/completions", json=body | {"prompt": prompt}).json()
        whole = [*prompt, *turn["choices"][0]["token_ids"], *range(20, 30)]
        after = http.post("/v1/completions", json=body | {"prompt": whole}).json()

    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == (300 + 39) // 16 * 16
    assert [after["choices"][0]["token_ids"]] == _wanted(cluster, request, whole, 40, "decode-0", 1)


def test_a_class_has_limits_of_its_own(cluster: GuideCluster) -> None:
    body = {"model": "tiny", "max_tokens": 400, "ignore_eos": True, "prompt": "hello", "stream": True}
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:

        def ask(name: str) -> AbstractContextManager[httpx.Response]:
            return http.stream("POST", "/v1/completions", json=body, headers={"X-Pdserve-Class": name})

        with ask("quick") as answer:
            gauges = (cluster.gauge("pdserve_gap_limit_seconds") for _ in answer.iter_lines())
            has_limit = any(0.02 in [one.value for one in gauge] for gauge in gauges)
        with ask("never") as refused:
            message = refused.read().decode()
        with ask("none") as unknown:
            unknown.read()

    assert has_limit
    assert (answer.status_code, refused.status_code, unknown.status_code) == (200, 429, 400)
    assert "(limit 1e-06 s, class never)" in message
    cluster.wait_idle()


def _wanted(
    cluster: GuideCluster, request: pytest.FixtureRequest, prompt: list[int], count: int, alone: str, n: int
) -> list[list[int]]:
    """Return the tokens of each sequence: of the fake engine of the instance `alone`, or of transformers."""
    if "--engine=fake" in cluster.flags:
        expected = partial(
            expected_tokens, FakeConfig(vocab_size=VOCAB_SIZE), prompt, SamplingParams(count), count=count,
            salts=[salt(cluster, alone)],
        )  # fmt: skip
        return [list(expected(sequence=sequence)) for sequence in range(n)]
    tiny_model: Path = request.getfixturevalue("tiny_model")
    return n * Oracle(tiny_model, "float32").generate_greedy([prompt], count, ignore_eos=True)
