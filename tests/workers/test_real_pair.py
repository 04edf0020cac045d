"""A pair of real vLLM workers with NIXL and a tiny random model: the contract of the double, and a kill in each leg.

vLLM is the program of PDSERVE_VLLM_COMMAND, or `vllm` on the PATH. The contract alone runs on a pair that is named by
PDSERVE_VLLM_PREFILL and PDSERVE_VLLM_DECODE too (tests/testing/vllm_contract.py says how it must run), and its rows for
NixlPushConnector on one that is named by PDSERVE_VLLM_PUSH_PREFILL and PDSERVE_VLLM_PUSH_DECODE.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pdserve.verify_endpoints import compare, positions, verify_endpoints
from pdserve.workers.program import find_program
from scheduler.probe import PROBE_TOKEN_IDS
from scheduler.workers.proof import Position
from tests.conftest import MISSING
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from tests.faults.cases import ANSWER
from tests.faults.results import note
from tests.faults.stream_request import StreamResult, request_stream
from tests.images.image_files import file_of, image_of
from tests.scheduler.vision_model import chat, data_url, image_part
from tests.testing.vllm_contract import PUSH_ROWS, REFUSED, ROWS, Row, refusal, run_row
from tests.workers.real_pair import FIRST_ANSWER_S, RealPair, Routed, warm
from tests.workers.tiny_vision import make_tiny_vision
from wire.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(2400)]

NAMED = ("PDSERVE_VLLM_PREFILL", "PDSERVE_VLLM_DECODE")
NAMED_PUSH = ("PDSERVE_VLLM_PUSH_PREFILL", "PDSERVE_VLLM_PUSH_DECODE")
PROMPT = [5, 9, 13, *range(20, 140)]
LENGTH = 96
IN_MID_STREAM = 12
LOCAL = (
    "--when-prefill-is-gone", "local", "--when-decode-is-gone", "local", "--stall-timeout", "300",
    "--first-token-timeout", "600",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose heads have the size that vLLM's CPU attention wants."""
    folder = tmp_path_factory.mktemp("real") / "tiny"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=384, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    network.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@contextmanager
def running(model: Path, dtype: str = "float32") -> Iterator[RealPair]:
    """Start a pair, and end it."""
    try:
        program = find_program("vllm", os.environ)
    except ConfigError as error:
        pytest.skip(f"{MISSING}: {error}; docs/route.md has the commands")
    pair = RealPair(program, model.parent, model, dtype)
    try:
        pair.start("prefill", "decode")
        warm(pair)
        yield pair
    finally:
        pair.end()


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[RealPair]:
    """A pair that this run starts."""
    with running(model) as pair:
        yield pair


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The URLs of P and D: of a named pair, or of one that is started."""
    prefill, decode = (os.environ.get(name, "") for name in NAMED)
    if prefill and decode:
        return prefill, decode
    pair = request.getfixturevalue("started")
    return pair.url("prefill"), pair.url("decode")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_real_pair_keeps_the_contract(row: Row, urls: tuple[str, str]) -> None:
    asyncio.run(run_row(row, *urls))


@pytest.mark.parametrize("row", PUSH_ROWS, ids=lambda row: row.__name__)
def test_a_real_push_pair_keeps_the_contract(row: Row) -> None:
    urls = [os.environ.get(name, "") for name in NAMED_PUSH]
    if not all(urls):
        pytest.skip(f"{' and '.join(NAMED_PUSH)} name no running pair")
    asyncio.run(run_row(row, *urls))


@pytest.mark.parametrize(("fields", "status", "kind"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_real_worker_refuses(fields: dict[str, Any], status: int, kind: str, urls: tuple[str, str]) -> None:
    asyncio.run(run_row(refusal(fields, status, kind), *urls))


@pytest.fixture(scope="module")
def routed(started: RealPair) -> Iterator[Routed]:
    """`pdserve route`, whose workers serve alone while the other is gone."""
    with started.routed(*LOCAL) as routed:
        yield routed


@pytest.fixture(scope="module")
def right(routed: Routed) -> str:
    """The answer without a fault."""
    result = asyncio.run(_ask(routed))
    assert result.outcome == ANSWER, result
    return result.text


def test_verify_finds_the_pair_equal_to_decode_alone(routed: Routed, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_endpoints(routed.client.base_url, routed.pair.url("decode"), 3, 8) == 0

    assert capsys.readouterr().out.splitlines()[-1].startswith("3 of 3 prompts equal; ")


Kill = Callable[[Routed], Coroutine[Any, Any, StreamResult]]


async def prefill_before_its_leg(routed: Routed) -> StreamResult:
    routed.pair.send("prefill", signal.SIGKILL)
    return await _ask(routed)


async def prefill_in_its_leg(routed: Routed) -> StreamResult:
    return await _ask_while_stopped(routed, "prefill", "prefill")


async def prefill_after_its_leg(routed: Routed) -> StreamResult:
    return await _ask_while_stopped(routed, "decode", "prefill")


async def decode_before_its_leg(routed: Routed) -> StreamResult:
    return await _ask_while_stopped(routed, "prefill", "decode")


async def decode_in_its_leg(routed: Routed) -> StreamResult:
    return await _ask_while_stopped(routed, "decode", "decode")


async def decode_in_mid_stream(routed: Routed) -> StreamResult:
    def take(num_tokens: int) -> None:
        if num_tokens == IN_MID_STREAM:
            routed.pair.send("decode", signal.SIGKILL)

    return await _ask(routed, take)


KILLS: list[tuple[str, Kill]] = [
    ("prefill", prefill_before_its_leg),
    ("prefill", prefill_in_its_leg),
    ("prefill", prefill_after_its_leg),
    ("decode", decode_before_its_leg),
    ("decode", decode_in_its_leg),
    ("decode", decode_in_mid_stream),
]


@pytest.mark.parametrize(("role", "kill"), KILLS, ids=[kill.__name__ for _, kill in KILLS])
def test_a_killed_worker_costs_no_answer(role: str, kill: Kill, routed: Routed, right: str) -> None:
    began = time.monotonic()
    result = asyncio.run(kill(routed))
    took_s = time.monotonic() - began
    routed.pair.start(role)
    routed.wait_whole()
    fetched = routed.pair.gauge("decode", "vllm:external_prefix_cache_hits_total")
    after = asyncio.run(_ask(routed))

    assert (result.outcome, result.text) == (ANSWER, right), result.message
    assert (after.outcome, after.text) == (ANSWER, right), after.message
    assert routed.pair.gauge("decode", "vllm:external_prefix_cache_hits_total") > fetched, "the pair served it"
    note(f"| real vLLM: {kill.__name__} | killed | {result.outcome} | {took_s:.1f} |")


def test_in_bfloat16_a_continued_answer_diverges_within_the_gap(model: Path) -> None:
    """Decode is killed in mid-stream, and prefill goes on alone: it rounds otherwise."""
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    with running(model, "bfloat16") as pair, pair.routed(*LOCAL) as routed, ThreadPoolExecutor(1) as thread:
        alone = _completion(pair.url("decode"), body)
        routed.wait_whole()
        before = pair.gauge("decode", "vllm:generation_tokens_total")
        asking = thread.submit(_completion, routed.client.base_url, body)
        while pair.gauge("decode", "vllm:generation_tokens_total") < before + IN_MID_STREAM:
            assert not asking.done(), asking.result()
        pair.send("decode", signal.SIGKILL)
        found = compare(alone, asking.result())

        assert found.is_close, found
        assert routed.gauge("pdserve_prompts_retried_total") == 1
    shown = f"{found.divergence or 'equal'}, gap {found.largest_gap:.3g}"
    note(f"| real vLLM in bfloat16: decode in mid-stream | killed | {shown} | |")


def test_images_through_a_real_pair_are_those_of_decode_alone(tmp_path: Path) -> None:
    """The scheduler does not know the model's family: the workers alone count its images."""
    fetched, outputs = "vllm:external_prefix_cache_hits_total", list[Any]()
    with running(make_tiny_vision(tmp_path / "vision")) as pair, pair.routed(*LOCAL[4:]) as routed:
        for seed in range(2):
            image = data_url(file_of(image_of(60, 40, seed=seed)))
            body = {
                "model": "tiny", "messages": chat("what is ", image_part(image, detail="low"), "?"), "temperature": 0,
                "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": True, "top_logprobs": 2,
            }  # fmt: skip
            before = pair.gauge("decode", fetched)
            through = _chat(routed.client.base_url, body)
            others = pair.gauge("decode", fetched) - before - through["usage"]["prompt_tokens"]
            assert others >= 0
            assert others % len(PROBE_TOKEN_IDS) == 0, "probes may have come between"
            alone = _chat(pair.url("decode"), body)
            (mine,), (theirs,) = through["choices"], alone["choices"]

            assert mine["token_ids"] == theirs["token_ids"]
            assert [one["logprob"] for one in mine["logprobs"]["content"]] == pytest.approx(
                [one["logprob"] for one in theirs["logprobs"]["content"]], abs=1e-3
            )
            assert through["prompt_token_ids"] == alone["prompt_token_ids"]
            assert through["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
            outputs.append(mine["token_ids"])
    assert outputs[0] != outputs[1]


def test_an_image_to_a_real_text_model_is_the_clients_error(routed: Routed) -> None:
    body = {"model": "tiny", "messages": chat(image_part(data_url()))}
    response = httpx.post(f"{routed.client.base_url}/v1/chat/completions", json=body, timeout=FIRST_ANSWER_S)

    assert response.status_code == 400, response.text
    assert "is not a multimodal model" in response.json()["error"]["message"]


def _completion(base_url: str, body: dict[str, Any]) -> list[Position]:
    response = httpx.post(f"{base_url}/v1/completions", json=body, timeout=FIRST_ANSWER_S)
    assert response.status_code == 200, response.text
    return positions(response.json()["choices"][0]["logprobs"])


def _chat(base_url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=FIRST_ANSWER_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def _ask(routed: Routed, on_token: Callable[[int], None] = lambda count: None) -> StreamResult:
    async with httpx.AsyncClient(base_url=routed.client.base_url, timeout=600.0) as client:
        return await request_stream(client, PROMPT, LENGTH, on_token=on_token)


async def _ask_while_stopped(routed: Routed, stopped: str, killed: str) -> StreamResult:
    """Send a request while one worker is stopped, which keeps it in that worker's leg, and kill one there.

    On a busy machine the stopped worker may be lost before: then that was the request's fault, and another one is sent.
    """
    pair = routed.pair
    while True:
        pair.send(stopped, signal.SIGSTOP)
        asking = asyncio.create_task(_ask(routed))
        await routed.until_running()
        while stopped == "decode" and not (pair.holds_only("prefill") or asking.done()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
        if stopped == killed or not (asking.done() or routed.has_lost()):
            break
        pair.send(stopped, signal.SIGCONT)
        await asking
        routed.wait_whole()
    pair.send(killed, signal.SIGKILL)
    if stopped != killed:
        pair.send(stopped, signal.SIGCONT)
    return await asking
