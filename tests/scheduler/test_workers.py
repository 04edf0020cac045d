"""The scheduler in front of fake vLLM workers on real sockets: every request ends once, with the right tokens."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import orjson
import pytest

from scheduler.limits import ControlLimits
from scheduler.request import GenerationRequest
from scheduler.workers.answers import kv_transfer_params
from scheduler.workers.load import KvCache, engine_labels, kv_cache, read_load
from scheduler.workers.progress import Progress
from scheduler.workers.request_body import generate_body, prefill_body
from scheduler.workers.transfers import HeldKv
from testing.engine.fake_model import expected_tokens
from testing.vllm_worker.faults import Action, Fault, Point
from testing.vllm_worker.settings import Connector, WorkerSettings
from testing.vllm_worker.worker import Received
from tests.scheduler.fake_cluster import Running, request
from tests.scheduler.virtual_time import until, virtual
from tests.scheduler.worker_cluster import SETTINGS, WorkerCluster, leg_id, with_fake
from wire.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
    OutputDiffers,
    PdserveError,
)
from wire.load import LoadSnapshot
from wire.types import (
    BeamSearch,
    Pooling,
    PromptImage,
    PromptState,
    RepetitionDetection,
    Role,
    SamplingParams,
    StructuredOutput,
    Thinking,
)

PROMPT = tuple(range(10, 60))
LENGTH = 24
_NO_PROBES = ControlLimits(probe_after_s=3600.0)  # a probe would take the fault


def _right(prompt: tuple[int, ...], count: int) -> list[int]:
    return list(expected_tokens(SETTINGS.fake, prompt, _greedy().params, count=count, salts=[0]))


def _rank(one: Received) -> str | None:
    return next((value for name, value in one.headers.items() if name.lower() == "x-data-parallel-rank"), None)


def _greedy(**changes: Any) -> GenerationRequest:
    return request(PROMPT, temperature=0.0, max_tokens=LENGTH, **changes)


@pytest.mark.anyio
async def test_a_pair_answers_as_the_decode_worker_alone() -> None:
    async with WorkerCluster("PD").serving() as cluster:
        answer = await cluster.answer(_greedy())
        assert answer.tokens == {(0, 0): _right(PROMPT, LENGTH)}
        assert answer.done[0].path == "prefill_first"

        prefill, decode = (worker.received for worker in cluster.workers)
        assert [one.leg for one in (*prefill, *decode)] == ["prefill", "decode"]
        ids = {leg_id(one) for one in (*prefill, *decode)}
        assert len(ids) == 1
        assert "r" not in ids


@pytest.mark.parametrize("traceparent", ["", f"00-{'a' * 32}-{'b' * 16}-01"])
@pytest.mark.anyio
async def test_both_legs_continue_the_requests_trace(traceparent: str) -> None:
    async with WorkerCluster("PD").serving() as cluster:
        await cluster.answer(dataclasses.replace(_greedy(), traceparent=traceparent))
        sent = [one.headers.get("traceparent", "") for worker in cluster.workers for one in worker.received]
        assert sent == [traceparent, traceparent]


@pytest.mark.anyio
async def test_each_sequence_of_a_prompt_has_legs_of_its_own() -> None:
    async with WorkerCluster("PD").serving() as cluster:
        answer = await cluster.answer(request(PROMPT, PROMPT[:7], n=3, max_tokens=LENGTH, seed=5, logprobs=2))
        assert len({tuple(ids) for ids in answer.tokens.values()}) == 6
        assert all(len(ids) == LENGTH for ids in answer.tokens.values())
        legs = [leg_id(one) for worker in cluster.workers for one in worker.received]
        assert len(legs) == 12
        assert len(set(legs)) == 6


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("leg", "point", "action"),
    [
        ("prefill", "before", "die"),
        ("prefill", "before", "drop"),
        ("prefill", "before", "error"),
        ("prefill", "before", "html"),
        ("prefill", "before", "empty"),
        ("prefill", "after", "die"),
        ("prefill", "after", "drop"),
        ("decode", "before", "die"),
        ("decode", "before", "drop"),
        ("decode", "before", "error"),
        ("decode", "before", "html"),
        ("decode", "before", "empty"),
        ("decode", "during", "die"),
        ("decode", "during", "drop"),
        ("decode", "during", "cut"),
        ("decode", "during", "error"),
        ("decode", "after", "die"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["append", "again"])
@pytest.mark.anyio
async def test_a_leg_that_fails_is_done_again_elsewhere(
    leg: Any, point: Point, action: Action, temperature: float
) -> None:
    wanted = request(PROMPT, temperature=temperature, seed=7, max_tokens=LENGTH)
    async with WorkerCluster("PPDD", with_fake(step_seconds=0.002), limits=_NO_PROBES).serving() as cluster:
        right = (await cluster.answer(wanted)).tokens
        fault = Fault(action, point, leg, after_tokens=5 if leg == "decode" else 0)
        cluster.workers[0 if leg == "prefill" else 2].faults.add(fault)
        answers = [await cluster.answer(wanted) for _ in range(3)]
        while fault.times:  # the other pair was chosen
            answers.append(await cluster.answer(wanted))
        assert [answer.tokens for answer in answers] == [right] * len(answers)
        again = sum(answer.done[0].tries for answer in answers) - len(answers)
        assert (cluster.control.dispatch.ledger.retried_tokens >= len(PROMPT)) is (again > 0)
        is_whole = (leg, point) == ("decode", "after")  # the finish reason may have arrived before the end
        assert again in ((0, 1) if is_whole else (1,))
        await until(lambda: not cluster.kv_usage(Role.DECODE))


@pytest.mark.anyio
async def test_another_output_of_the_next_worker_is_counted() -> None:
    wanted = request(PROMPT, temperature=0.8, seed=7, max_tokens=LENGTH)
    async with WorkerCluster("CC", with_fake(), with_fake(salt=1), limits=_NO_PROBES).serving() as cluster:
        for worker in cluster.workers:
            worker.faults.add(Fault("cut", "during", after_tokens=5))
        with pytest.raises(OutputDiffers, match="the regenerated output differs from what was sent before"):
            await cluster.answer(wanted)
        ledger = cluster.control.dispatch.ledger
        assert (ledger.differing_outputs, ledger.retried_prompts, ledger.retried_tokens) == (1, 1, len(PROMPT) + 5)


@pytest.mark.parametrize(
    ("prefill", "why"),
    [
        (with_fake(salt=1), "prefill-0 at http.* have not answered like decode-0 alone: token 0 is"),
        (dataclasses.replace(SETTINGS, connector="none"), "prefill-0 at http.*: it holds no KV"),
    ],
    ids=["another answer", "no connector"],
)
@pytest.mark.anyio
async def test_a_pair_that_answers_otherwise_than_decode_alone_never_serves(prefill: WorkerSettings, why: str) -> None:
    cluster = WorkerCluster("PD", prefill, SETTINGS)
    cluster.connector = "auto"
    with pytest.raises(DeadlineExceeded, match=why):
        async with cluster.serving(path_s=2.0):
            pass


@pytest.mark.anyio
async def test_a_decode_worker_that_computes_the_prompt_itself_is_counted() -> None:
    deaf = dataclasses.replace(SETTINGS, connector="none")
    async with WorkerCluster("PD", SETTINGS, deaf).serving() as cluster:
        assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right(PROMPT, LENGTH)}
        decode = cluster.control.registry.instance(1)
        await until(lambda: decode.load.prompts_recomputed >= 2)  # the proof's prompt was the first


@pytest.mark.parametrize(("roles", "max_tokens"), [("PD", LENGTH), ("PD", 1), ("C", LENGTH)])
@pytest.mark.anyio
async def test_log_probabilities_of_the_prompt_come_on_every_path(roles: str, max_tokens: int) -> None:
    async with WorkerCluster(roles).serving() as cluster:
        answer = await cluster.answer(request(PROMPT, temperature=0.0, max_tokens=max_tokens, prompt_logprobs=1))
        assert answer.tokens == {(0, 0): _right(PROMPT, max_tokens)}
        assert [one is None for one in answer.scored[0]] == [True] + [False] * (len(PROMPT) - 1)


@pytest.mark.anyio
async def test_each_rank_of_a_worker_is_a_member() -> None:
    async with WorkerCluster("PD", dataclasses.replace(SETTINGS, num_ranks=2)).serving() as cluster:
        registry = cluster.control.registry
        names = ["prefill-0", "prefill-0-rank-1", "decode-0", "decode-0-rank-1"]
        assert [one.expected.name for one in registry.members] == names
        assert len({one.in_flight for one in registry.living()}) == 4
        await asyncio.gather(*(cluster.answer(_greedy()) for _ in range(8)))
        prefill, decode = (worker.received for worker in cluster.workers)
        assert {_rank(one) for one in prefill} == {_rank(one) for one in decode} == {"0", "1"}
        held_by = {leg_id(one): _rank(one) for one in prefill}
        for one in decode:
            assert one.body["kv_transfer_params"]["remote_engine_id"].endswith(f"_dp{held_by[leg_id(one)]}")

        worker = cluster.workers[0]
        await worker.stop()
        worker.settings = dataclasses.replace(worker.settings, num_ranks=1)
        await worker.start()
        await until(lambda: [one.expected.name for one in registry.members] == [names[0], *names[2:]])
        await until(lambda: not (registry.missing() or registry.gaps()))
        worker.received.clear()
        assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right(PROMPT, LENGTH)}
        assert [_rank(one) for one in worker.received] == [None]


@pytest.mark.anyio
async def test_an_idle_worker_that_restarts_at_once_is_another_one() -> None:
    async with WorkerCluster("PD").serving() as cluster:
        registry, worker = cluster.control.registry, cluster.workers[1]
        before = registry.instance(1).description.epoch
        await worker.stop()
        await worker.start()
        await until(
            lambda: [one.description.epoch for one in registry.living() if one.index == 1] not in ([], [before])
        )
        assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right(PROMPT, LENGTH)}  # waits for the proof


@pytest.mark.anyio
async def test_a_stop_by_the_client_aborts_the_request_on_the_worker() -> None:
    async with WorkerCluster("PD", with_fake(step_seconds=0.05)).serving() as cluster:
        wanted = dataclasses.replace(_greedy(), params=SamplingParams(max_tokens=400, temperature=0.0))
        running = Running(cluster.control.dispatch, wanted, is_last=lambda token: token.index == 3)
        await asyncio.wait_for(running.task, 30.0)
        await until(lambda: not cluster.workers[1].ranks[0].running)


_STATE = PromptState("a", "r", (1, 2, 3), SamplingParams(max_tokens=9, temperature=0.0), ((),))
_OUT = ((7, 8),)


@pytest.mark.parametrize(
    ("params", "outputs", "body"),
    [
        ({}, ((),), {"prompt": [1, 2, 3], "max_tokens": 9}),
        ({}, _OUT, {"prompt": [1, 2, 3, 7, 8], "max_tokens": 7}),
        ({"min_tokens": 5}, _OUT, {"prompt": [1, 2, 3, 7, 8], "min_tokens": 3}),
        ({"temperature": 0.5, "seed": 4}, _OUT, {"prompt": [1, 2, 3], "max_tokens": 9, "seed": 4}),
        ({"presence_penalty": 1.0}, _OUT, {"prompt": [1, 2, 3], "presence_penalty": 1.0}),
        ({"repetition_penalty": 1.1}, _OUT, {"prompt": [1, 2, 3], "repetition_penalty": 1.1}),
        (
            {"repetition_detection": RepetitionDetection(3, 1, 4)}, _OUT,
            {
                "prompt": [1, 2, 3],
                "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4},
            },
        ),
        (
            {"structured": StructuredOutput("json", '{"type": "object"}')}, _OUT,
            {"prompt": [1, 2, 3], "structured_outputs": {"json": {"type": "object"}}},
        ),
        ({"structured": StructuredOutput("json_object", "")}, ((),), {"structured_outputs": {"json_object": True}}),
        ({"structured": StructuredOutput("choice", '["a"]')}, ((),), {"structured_outputs": {"choice": ["a"]}}),
        ({"structured": StructuredOutput("regex", "a+")}, ((),), {"structured_outputs": {"regex": "a+"}}),
        ({"thinking": Thinking(7, 8, True, 1, 4)}, _OUT, {"prompt": [1, 2, 3], "thinking_token_budget": 4}),
        ({"thinking": Thinking(7, 8, budget=0)}, ((),), {"thinking_token_budget": 0}),
        (
            {"thinking": Thinking(7, 8), "structured": StructuredOutput("json_object", "")}, ((),),
            {"structured_outputs": {"json_object": True}, "thinking_token_budget": 12},
        ),
        ({"stop_token_ids": (5,)}, ((),), {"stop_token_ids": [5], "ignore_eos": True}),
        ({"logprobs": 3}, _OUT, {"prompt": [1, 2, 3, 7, 8], "logprobs": 3, "return_tokens_as_token_ids": True}),
        ({"logprob_token_ids": (4,)}, ((),), {"logprobs": 0, "logprob_token_ids": [4]}),
        ({"logit_bias": ((4, -1.5),)}, ((),), {"logit_bias": {"4": -1.5}}),
        ({"allowed_token_ids": (4, 5)}, ((),), {"allowed_token_ids": [4, 5]}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, ((),), {"top_p": 0.5, "top_k": 3, "min_p": 0.1}),
    ],
)  # fmt: skip
def test_a_decode_leg_keeps_every_parameter(
    params: dict[str, Any], outputs: tuple[tuple[int, ...], ...], body: dict[str, Any]
) -> None:
    state = dataclasses.replace(_STATE, params=dataclasses.replace(_STATE.params, **params), outputs=outputs)
    body_sent = generate_body("m", state, 0, {"k": 1})
    assert isinstance(body_sent, bytes)
    made = orjson.loads(body_sent)
    assert {name: made[name] for name in body} == body
    assert made["kv_transfer_params"] == {"k": 1}
    assert made["stream"]


def test_a_prefill_leg_has_what_decode_may_refuse() -> None:
    params = dataclasses.replace(_STATE.params, logprobs=3, prompt_logprobs=2, min_tokens=4, thinking=Thinking(7, 8))
    state = dataclasses.replace(_STATE, params=params, cache_salt="s", outputs=())
    body_sent = prefill_body("m", state, 0, HeldKv().prefill_leg("a"))
    assert isinstance(body_sent, bytes)
    made = orjson.loads(body_sent)
    assert made.pop("kv_transfer_params")["do_remote_decode"] is True
    decode = generate_body("m", state, 0)
    assert isinstance(decode, bytes)
    streamed = ("stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens")
    refused_alike = {key: value for key, value in orjson.loads(decode).items() if key not in streamed}
    assert made == refused_alike | {"max_tokens": 1, "min_tokens": 1, "stop_token_ids": []}


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        ({"beam_search": BeamSearch(), "best_of": 2}, {}, "beam search is not available over workers"),
        ({"bad_words": ((5,),)}, {}, "bad_words is not available over workers"),
        ({"prompt_logprobs": 0, "prompt_logprob_token_ids": ((5,),)}, {}, "prompt_logprob_token_ids is not available"),
        ({}, {"poolings": (Pooling(),)}, "vectors and scores are not available over workers"),
        ({}, {"images": ((PromptImage(0, 1, b"a" * 32, (1, 1, 1)),),)}, "images with a text prompt, are not"),
    ],
)
@pytest.mark.anyio
async def test_what_no_worker_can_do_is_refused_with_the_reason(
    params: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    async with WorkerCluster("PD").serving() as cluster:
        with pytest.raises(InvalidRequest, match=message):
            await cluster.answer(dataclasses.replace(_greedy(**params), **more))
        assert not cluster.workers[0].received


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"thinking": Thinking(7, 8, budget=3)}, "thinking_token_budget needs --reasoning-parser"),
        ({"logprobs": 21}, "greater than max: 20"),
        ({"structured": StructuredOutput("regex", "(")}, "Failed to transform regex"),
    ],
)
@pytest.mark.parametrize("connector", ["nixl", "ascend-layerwise", "nixl-push", "mooncake"])
@pytest.mark.anyio
async def test_what_a_worker_refuses_leaves_no_kv(connector: Connector, params: dict[str, Any], message: str) -> None:
    async with WorkerCluster("PD", dataclasses.replace(SETTINGS, connector=connector)).serving() as cluster:
        computed = cluster.workers[0].ranks[0].counts.computed_tokens
        with pytest.raises(InvalidRequest, match=message):
            await cluster.answer(_greedy(**params))
        assert cluster.workers[0].ranks[0].counts.computed_tokens == computed
        assert cluster.kv_usage(Role.PREFILL) == cluster.kv_usage(Role.DECODE) == 0


_METRICS = "\n".join((
    *(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank}.0' for rank in (10, 9)),
    *(f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 3.0' for rank in (10, 9)),
    *(
        f'vllm:num_requests_kv_fetch_by_stage{{engine="{rank}",model_name="m",stage="{stage}"}} {count}.0'
        for rank, stage, count in ((9, "in_progress", 2), (9, "waiting_to_start", 4), (10, "in_progress", 7))
    ),
    *(f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} 0.25' for rank in (10, 9)),
    'vllm:generation_tokens_total{engine="9",model_name="m"} 1e3',
    'vllm:generation_tokens_created{engine="9",model_name="m"} 1.7e9',
    'vllm:prompt_tokens_total{engine="10",model_name="m"} 24.0',
    *(f'vllm:cache_config_info{{block_size="32",engine="{rank}",num_gpu_blocks="100"}} 1.0' for rank in (10, 9)),
)).encode()  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "num_blocks", "load"),
    [(b"", 200, (19, 6, 50, 1024)), (b'engine="9"', 100, (9, 3, 25, 1000)), (b'engine="10"', 100, (10, 3, 25, 24))],
)
def test_the_load_is_that_of_one_engine_or_of_all(engine: bytes, num_blocks: int, load: tuple[int, ...]) -> None:
    assert engine_labels(_METRICS) == [b'engine="9"', b'engine="10"']
    cache = kv_cache(_METRICS, engine)
    assert cache == KvCache(num_blocks, 32)
    read = read_load(_METRICS, cache, engine)
    found = read.snapshot
    assert read.num_fetching == (2 if b"9" in engine else 7 if engine else 9)
    assert (found.running, found.waiting, found.blocks_used, found.steps) == load


@pytest.mark.parametrize(
    ("num_tokens", "rate", "has_images", "waiting", "receiving", "look_s", "ends_after_s"),
    [
        (100, 1000.0, False, 0, 0, 1.0, 9),
        (100, 10.0, False, 0, 0, 1.0, 41),
        (100, 1000.0, True, 0, 0, 1.0, 60),
        (0, 1000.0, True, 0, 0, 1.0, 60),
        (0, 1.0, False, 0, 0, 1.0, 9),
        (100, 1000.0, False, 1, 0, 1.0, None),
        (100, 1000.0, False, 1, 1, 1.0, 9),
        (100, 1000.0, False, 2, 1, 1.0, None),
        (100, 1000.0, False, 0, 0, 30.0, 150),
    ],
    ids=[
        "fast worker",
        "slow worker",
        "a chat with images",
        "its second sequence",
        "in mid-stream",
        "requests wait there",
        "one waits for its KV",
        "another one waits too",
        "this process could not run",
    ],
)
@virtual
async def test_a_leg_without_an_answer_ends_after_what_its_worker_needs(
    num_tokens: int,
    rate: float,
    has_images: bool,
    waiting: int,
    receiving: int,
    look_s: float,
    ends_after_s: int | None,
) -> None:
    clock = asyncio.get_running_loop().time
    progress = Progress(clock)
    with progress.leg(100) as first:
        await asyncio.sleep(100 / rate)
        first.heard()
    began = clock()

    async def wait_for_an_answer() -> float:
        with pytest.raises(InstanceLost, match="no answer for"), progress.leg(num_tokens, has_images=has_images):
            await asyncio.sleep(3600.0)
        return clock() - began

    leg = asyncio.create_task(wait_for_an_answer())
    with contextlib.ExitStack() as stack:
        for _ in range(receiving):
            stack.enter_context(progress.leg(0, receives=True))
        for step in range(200):
            await asyncio.sleep(look_s)
            load = progress.judged(LoadSnapshot(running=1, waiting=waiting, steps=step))
            assert load.waiting == waiting - receiving, "what waits for a free block"
            if leg.done():
                break
    if ends_after_s is None:
        assert not leg.done()
        leg.cancel()
    else:
        assert await leg == pytest.approx(ends_after_s, abs=look_s)


@virtual
async def test_a_worker_is_full_until_it_runs_less_than_when_it_queued() -> None:
    progress, reserved = Progress(asyncio.get_running_loop().time), asyncio.Event()

    def waiting(running: int, waiting: int, num_fetching: int | None = None) -> int:
        return progress.judged(LoadSnapshot(running=running, waiting=waiting), num_fetching).waiting

    with progress.leg(0, receives=True, reserved=reserved):
        assert [waiting(3, 1) for _ in range(2)] == [0, 1], "at first it had no time to reserve"
        reserved.set()
        assert waiting(3, 1) == 1
        assert [waiting(running, 1) for running in (2, 3)] == [0, 0]
    assert waiting(3, 1, 0) == 1
    assert [waiting(running, 1, 1) for running in (3, 2, 3)] == [1, 0, 0]


@pytest.mark.parametrize(("has_images", "kind"), [(False, NoCapacity), (True, HandoffFailed)], ids=["text", "images"])
@virtual
async def test_kv_must_be_read_while_it_is_held(has_images: bool, kind: type[PdserveError]) -> None:
    clock = asyncio.get_running_loop().time
    progress, began = Progress(clock), clock()

    async def read(after_s: float) -> float:
        with progress.leg(100, has_images=has_images, until=began + 20.0) as leg:
            await asyncio.sleep(after_s)
            leg.heard()
            await asyncio.sleep(2.0)
        return clock() - began

    in_time, never = asyncio.create_task(read(19.0)), asyncio.create_task(read(3600.0))
    with pytest.raises(kind, match="held"):  # this process may have stood still, so that nobody looked
        await read(20.0)
    assert not never.done()
    progress.judged(LoadSnapshot(waiting=1))
    with pytest.raises(kind, match="held"):
        await never
    assert await in_time == pytest.approx(21.0)


@pytest.mark.parametrize(("num_text", "turn_s"), [(1, 0.2), (0, 15.0)], ids=["beside a text", "alone"])
@virtual
async def test_an_images_time_is_that_of_its_own_leg(num_text: int, turn_s: float) -> None:
    clock = asyncio.get_running_loop().time
    progress = Progress(clock)
    with progress.leg(100) as first:
        await asyncio.sleep(0.1)
        first.heard()

    async def wait_for_an_answer(*, has_images: bool) -> float:
        began = clock()
        with pytest.raises(InstanceLost), progress.leg(100, has_images=has_images):
            await asyncio.sleep(3600.0)
        return clock() - began

    legs = [asyncio.create_task(wait_for_an_answer(has_images=True))]
    legs += [asyncio.create_task(wait_for_an_answer(has_images=False)) for _ in range(num_text)]
    await asyncio.sleep(1.0)
    load = progress.judged(LoadSnapshot(running=len(legs)))
    assert load.slowest_turn_s == pytest.approx(turn_s, abs=0.01)
    while not all(leg.done() for leg in legs):
        await asyncio.sleep(1.0)
        progress.judged(LoadSnapshot(running=1))
    assert [await leg for leg in legs] == pytest.approx([60.0, 9.0][: 1 + num_text], abs=1.0)


_ANSWER = {
    "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
    "remote_block_ids": [[1]], "remote_prefill_cached_tokens": 0, "tp_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"do_remote_prefill": False}, "it holds no KV.*MooncakeLayerwiseConnector needs --connector ascend-layerwise"),
        ({"remote_host": None}, "no remote_host, without which vLLM's decode worker crashes"),
        ({"remote_block_ids": [], "remote_port": None}, "no remote_port, remote_block_ids"),
    ],
)
def test_only_a_whole_reference_is_passed_on(changes: dict[str, Any], message: str | None) -> None:
    answer = {"kv_transfer_params": _ANSWER | changes}
    if message is None:
        assert kv_transfer_params(answer) == {key: _ANSWER[key] for key in _ANSWER if "cached" not in key}
    else:
        with pytest.raises(HandoffFailed, match=message):
            kv_transfer_params(answer)
