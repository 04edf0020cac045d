"""The same results from an engine in this process, from a pair of its own, and from a running cluster."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.processes import POLL_S
from pdserve.readiness import check_ready
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import START_TIMEOUT_S
from tests.conformance.served import CHAT
from tests.pdserve.offline.conftest import ENGINE
from wire.errors import ConfigError, Unavailable

pytestmark = pytest.mark.cluster

PROMPTS: list[Any] = ["Hello, my name is", [5, 6, 7, 8], {"prompt": "what is the capital"}, "the quick brown fox " * 12]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1, logprobs=0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1, max_tokens=10),
]
Outputs = list[RequestOutput]


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[LLM]:
    """A prefill and a decode instance that belong to the LLM."""
    with LLM(str(model), prefill=1, decode=1, seed=3, **ENGINE) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running server of the model, named `tiny`."""
    (port,), log = free_ports(1), tmp_path_factory.mktemp("serve") / "log"
    flags = ("--port", str(port), "--served-model-name", "tiny", "--api-key", "a-key", *ENGINE_FLAGS)
    command = [sys.executable, "-P", "-m", "pdserve", "serve", str(model), *flags]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        client, deadline = Client(f"http://127.0.0.1:{port}"), time.monotonic() + START_TIMEOUT_S
        while not check_ready(client)[0]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        yield client.base_url
        process.terminate()


def plain(outputs: Outputs) -> Outputs:
    """Without values that differ between runs; numbers are rounded to what two orders of float32 agree on."""
    return [dataclasses.replace(one, request_id="", num_cached_tokens=None) for one in outputs]


@pytest.mark.long
def test_the_three_places_give_the_same_results(model: Path, pair: LLM, cluster: str) -> None:
    found: list[tuple[Outputs, Outputs, list[list[int]]]] = []
    with (
        LLM(str(model), seed=3, **ENGINE) as local,  # type: ignore[arg-type]
        LLM("tiny", seed=3, cluster=cluster, api_key="a-key") as remote,
    ):
        for llm in (local, pair, remote):
            beams = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=6))[0].sequences
            texts, chats = llm.generate(PROMPTS, PARAMS), llm.chat([CHAT, CHAT], PARAMS[0])
            found.append((plain(texts), plain(chats), [beam.tokens for beam in beams]))

    for other in found[1:]:
        assert [_ids(one) for one in other[0]] == [_ids(one) for one in found[0][0]]
        assert [_ids(one) for one in other[1]] == [_ids(one) for one in found[0][1]]
        assert [_texts(one) for one in other[0]] == [_texts(one) for one in found[0][0]]
        assert [one.prompt for one in other[1]] == [one.prompt for one in found[0][1]]
        assert other[2] == found[0][2]
        for mine, theirs in zip(other[0], found[0][0], strict=True):
            assert _all_logprobs(mine) == pytest.approx(_all_logprobs(theirs), abs=1e-4)


def _ids(one: RequestOutput) -> list[list[int]]:
    return [one.prompt_token_ids, *(output.token_ids for output in one.outputs)]


def _texts(one: RequestOutput) -> list[object]:
    return [(output.text, output.finish_reason, output.stop_reason) for output in one.outputs]


def _all_logprobs(one: RequestOutput) -> list[float]:
    tables = [*(one.prompt_logprobs or ()), *(table for output in one.outputs for table in output.logprobs or ())]
    return [entry.logprob for table in tables if table is not None for entry in table.values()]


@pytest.mark.long
def test_a_cluster_is_used_with_a_key_and_a_served_model(cluster: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        LLM(cluster=cluster, api_key="wrong")
    with pytest.raises(ConfigError, match="the model 'other' is not served, only 'tiny'"):
        LLM("other", cluster=cluster, api_key="a-key")
    with LLM(cluster=f"{cluster}/v1", api_key="a-key") as llm:
        assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16


def test_a_pair_that_cannot_start_quotes_its_last_log_lines(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"its last lines:\n[\s\S]*--max-model-len 4096 exceeds 512"):
        LLM(str(model), prefill=1, max_model_len=4096, **ENGINE)  # type: ignore[arg-type]


# As in an environment of the base package, without these modules.
_WITHOUT_ENGINE = """
import sys
for name in ("torch", "transformers", "numpy", "safetensors", "xxhash"):
    sys.modules[name] = None
from pdserve import LLM, SamplingParams
llm = LLM(cluster=sys.argv[1], api_key="a-key")
print(llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids)
for wrong in (llm.get_tokenizer, lambda: LLM(sys.argv[2])):
    try:
        wrong()
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.long
def test_a_cluster_is_used_without_torch(cluster: str, model: Path, local: LLM) -> None:
    command = [sys.executable, "-c", _WITHOUT_ENGINE, cluster, str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert ended.stdout.splitlines() == [
        str(local.generate("hello", params)[0].outputs[0].token_ids),
        "ConfigError a tokenizer needs transformers: pip install 'pdserve[engine]'",
        "ConfigError a local model needs the engine (xxhash is missing): pip install 'pdserve[engine]'",
    ]


def test_a_missing_cluster_is_reported_soon() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        LLM(cluster=f"http://127.0.0.1:{port}")
