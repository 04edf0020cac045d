"""What is counted while requests run, and the same under vLLM's metric names."""

import dataclasses
import re
from typing import Any

import pytest

from scheduler.finished_requests import FinishedRequests
from scheduler.observability.counters import SchedulerCounters
from scheduler.observability.metrics import Metrics
from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone
from scheduler.view import ClusterView, InstanceView
from telemetry.bucket_bounds import vllm_tokens
from tests.scheduler.fake_cluster import describe
from wire.load import LoadSnapshot
from wire.types import Pooling, Role, SamplingParams, StageTimes


def _request(*prompts: int, **params: Any) -> GenerationRequest:
    """A request with prompts of these lengths in tokens."""
    made = tuple((1,) * length for length in prompts)
    return GenerationRequest("r", made, SamplingParams(**{"max_tokens": 16, **params}), 30.0, 10.0)


def _served(**times: Any) -> PromptDone:
    return PromptDone(0, "handoff", "", "p", "d", StageTimes(**times))


DONE = RequestDone(
    _request(100), (_served(queue_s=0.5, cached_tokens=64, num_swaps=1, num_rebuilds=2),), "finished", seconds=4.0,
    dispatched_s=0.25, first_token_s=1.0, last_token_s=3.5, num_output_tokens=6, reasons=("length",),
)  # fmt: skip


def _samples(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s].*) (\S+)$", metrics.render().decode(), re.M)}


def test_the_phases_of_a_request_add_up() -> None:
    """It is queued from 0.25 to 0.75, computed to 1.0 and decoded to 3.5."""
    assert (DONE.queue_s, DONE.prefill_s, DONE.decode_s) == (0.5, 0.25, 2.5)


@pytest.mark.covers("B.metrics.1")
def test_a_requests_outcome_is_under_vllms_metric_names() -> None:
    metrics = Metrics(model_name="m", max_model_len=1000)
    counters = metrics.counters
    counters.first_token_came(DONE.request, 1.0)
    counters.choice_started()
    for _ in range(5):
        counters.token_gap(0.5)
    counters.request_done(DONE)

    found = _samples(metrics)

    def value(name: str, labels: str = "") -> float:
        wanted = sorted([*filter(None, labels.split(",")), 'engine="cluster"', 'model_name="m"'])
        return found[f"vllm:{name}{{{','.join(wanted)}}}"]

    assert value("prompt_tokens_total") == 100
    assert value("generation_tokens_total") == 6
    assert value("request_success_total", 'finished_reason="length"') == 1
    assert value("request_success_total", 'finished_reason="stop"') == 0
    sums = {
        "time_to_first_token_seconds": 1.0, "inter_token_latency_seconds": 2.5, "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 0.5, "request_prefill_time_seconds": 0.25, "request_decode_time_seconds": 2.5,
        "request_inference_time_seconds": 2.75, "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 100, "request_generation_tokens": 6, "request_params_n": 1,
        "request_params_max_tokens": 16, "request_prefill_kv_computed_tokens": 36, "request_num_preemptions": 3,
    }  # fmt: skip
    assert {name: value(f"{name}_sum") for name in sums} == sums
    assert value("inter_token_latency_seconds_bucket", 'le="0.5"') == 5
    assert value("inter_token_latency_seconds_bucket", 'le="0.4"') == 0


def test_vllms_histograms_have_vllms_boundaries_and_ours_have_ours() -> None:
    text = Metrics(model_name="m", max_model_len=64).render().decode()

    def boundaries(name: str) -> list[str]:
        return re.findall(rf'^{name}_bucket{{.*?le="([^"]+)".*}} ', text, re.M)

    assert boundaries("vllm:request_params_n") == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    assert boundaries("vllm:request_prompt_tokens") == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]
    assert "0.02" in boundaries("vllm:time_to_first_token_seconds")
    assert "0.02" not in boundaries("pdserve_time_to_first_token_seconds")


def test_token_boundaries_end_at_the_models_length() -> None:
    assert vllm_tokens(200) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert vllm_tokens(199)[-1] == 100


@pytest.mark.covers("B.finish.3")
@pytest.mark.parametrize(("outcome", "reason"), [("cancelled", "abort"), ("failed", "error")])
def test_sequences_cut_short_are_counted_as_abort(outcome: str, reason: str) -> None:
    counters = SchedulerCounters()
    request = _request(3, 3, n=2, temperature=1.0)

    counters.request_done(RequestDone(request, (), outcome, 1.0, reasons=("stop",)))

    assert counters.reasons == {"stop": 1, reason: 3}
    assert counters.whole.count == 0


def test_a_prompt_is_counted_at_its_first_token_or_finish() -> None:
    counters = SchedulerCounters()
    counters.first_token_came(_request(7), 1.0)
    assert counters.prompt_tokens == 7

    counters.request_done(dataclasses.replace(DONE, request=_request(5), first_token_s=None, last_token_s=None))
    counters.request_done(dataclasses.replace(DONE, request=_request(7)))

    assert counters.prompt_tokens == 12
    assert counters.prefill.count == 1


def test_vectors_are_counted_as_vectors() -> None:
    counters = SchedulerCounters()
    request = dataclasses.replace(_request(5, 3), poolings=(Pooling(), Pooling()))

    counters.request_done(RequestDone(request, (_served(queue_s=0.5),), "finished", 1.0, dispatched_s=0.1))

    assert (counters.prompt_tokens, counters.output_tokens, counters.reasons) == (8, 0, {"stop": 2})
    assert (counters.whole.count, counters.max_tokens.count, counters.decode.count) == (1, 0, 0)


def test_each_stage_of_a_prompt_is_counted_where_it_was_measured() -> None:
    metrics = Metrics()
    metrics.counters.prompt_done(_served(queue_s=0.5, prefill_s=2.0))

    found = _samples(metrics)

    counts = {stage: found[f'pdserve_stage_seconds_count{{stage="{stage}"}}'] for stage in metrics.counters.stages}
    assert counts == {"queue": 1, "reserve": 0, "encode": 0, "prefill": 1, "send": 0, "first_step": 0}
    assert found['pdserve_stage_seconds_sum{stage="prefill"}'] == 2.0


def _view(*instances: InstanceView) -> ClusterView:
    return ClusterView(True, instances, FinishedRequests(), queued_prompts=4, queued_tokens=40)


@pytest.mark.covers("B.metrics.2")
def test_loads_are_under_vllms_names_with_an_engine_per_instance() -> None:
    load = LoadSnapshot(
        blocks_total=100, blocks_used=32, blocks_probe=2, running=3, waiting=1, preemptions=5, prefix_tokens_sought=96,
        prefix_tokens_found=64, images_sought=4, images_found=3,
    )  # fmt: skip
    view = _view(
        InstanceView(0, "prefill-0", Role.PREFILL, "a", "lost", "", None, None),
        InstanceView(2, "decode-0", Role.DECODE, "b", "living", "", describe(2, Role.DECODE, num_blocks=100), load),
    )

    found = _samples(Metrics(lambda: view, model_name="m"))

    engine = 'engine="2",model_name="m"'
    assert {name: value for name, value in found.items() if 'engine="2"' in name} == {
        f"vllm:num_requests_running{{{engine}}}": 3, f"vllm:num_requests_waiting{{{engine}}}": 1,
        f'vllm:num_requests_waiting_by_reason{{{engine},reason="capacity"}}': 1,
        f'vllm:num_requests_waiting_by_reason{{{engine},reason="deferred"}}': 0,
        f"vllm:kv_cache_usage_perc{{{engine}}}": 0.3, f"vllm:prefix_cache_queries_total{{{engine}}}": 96,
        f"vllm:prefix_cache_hits_total{{{engine}}}": 64, f"vllm:num_preemptions_total{{{engine}}}": 5,
        f"vllm:mm_cache_queries_total{{{engine}}}": 4, f"vllm:mm_cache_hits_total{{{engine}}}": 3,
        'vllm:cache_config_info{block_size="16",cache_dtype="float32",engine="2",kv_cache_max_concurrency="0.39",'
        'kv_cache_size_tokens="1600",num_gpu_blocks="100"}': 1,
    }  # fmt: skip
    assert found['vllm:num_requests_waiting{engine="cluster",model_name="m"}'] == 4
    assert found['vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}'] == 0


def test_each_instance_reports_the_tokens_of_its_steps() -> None:
    counts = (3, 2, *(0,) * 11, 1)  # three steps of one token, two of up to 8, one above 16,384
    load = LoadSnapshot(blocks_total=1, steps=6, tokens_computed=20_000, step_tokens=counts)
    silent = LoadSnapshot(blocks_total=1)
    view = _view(
        *(
            InstanceView(index, "c", Role.COMBINED, str(index), "living", "", None, reported)
            for index, reported in enumerate((load, silent))
        )
    )

    found = _samples(Metrics(lambda: view, model_name="m"))

    steps = {name: value for name, value in found.items() if name.startswith("vllm:iteration_tokens_total")}
    labels = 'engine="0",model_name="m"'
    assert steps[f"vllm:iteration_tokens_total_sum{{{labels}}}"] == 20_000
    assert steps['vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"}'] == 3
    assert steps['vllm:iteration_tokens_total_bucket{engine="0",le="16384.0",model_name="m"}'] == 5
    assert steps['vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"}'] == 6
    assert len(steps) == len(counts) + 2, "the other instance reports none"


def test_two_processes_of_one_entry_are_one_sample() -> None:
    loads = [LoadSnapshot(blocks_total=100, blocks_used=used) for used in (10, 20)]
    view = _view(
        *(
            InstanceView(0, "decode-0", Role.DECODE, str(pid), "living", "", None, load)
            for pid, load in enumerate(loads)
        )
    )

    text = Metrics(lambda: view, model_name="m").render().decode()

    assert re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text, re.M) == ["0.2"]


@pytest.mark.covers("B.metrics.3")
def test_http_requests_total_leaves_out_monitoring_routes() -> None:
    metrics = Metrics()
    for status in (200, 201, 404):
        metrics.http_request("/v1/completions", "POST", status)
    metrics.http_request("/metrics", "GET", 200)

    found = {name: value for name, value in _samples(metrics).items() if name.startswith("http_requests_total")}

    assert found == {
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}': 2,
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"}': 1,
    }


def test_the_process_memory_and_time_are_exported() -> None:
    found = _samples(Metrics())

    assert found["process_resident_memory_bytes"] > 1e6
    assert "process_cpu_seconds_total" in found
