"""What a P/D cluster reports: vLLM's metrics, logs as JSON on every process, and a trace across both halves."""

import json
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.pdserve_command import Pdserve
from tests.telemetry.collector import Collector, http_collector

pytestmark = pytest.mark.cluster

NAMES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_params_n_bucket", "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket", "cache_config_info", "num_requests_waiting_by_reason",
    "admission_rejections_total", "request_num_preemptions_bucket",
)  # fmt: skip
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def _ask(pdserve: Pdserve) -> str:
    """Send a request with a trace; return its id."""
    fields = {"model": "tiny", "prompt": "a text of several words", "max_tokens": 6, "ignore_eos": True}
    body = json.dumps(fields).encode()
    headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    request = urllib.request.Request(f"http://127.0.0.1:{pdserve.port}/v1/completions", body, headers)
    client = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with client.open(request, timeout=300) as answer:
        return str(json.load(answer)["id"])


def _events(log: Path) -> list[dict[str, object]]:
    """Return the events of a log; what is printed before the first one is text."""
    lines = log.read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("{"))
    return [json.loads(line) for line in lines[first:]]


@pytest.mark.covers("B.ops.2", "B.metrics.1", "B.metrics.3", "B.metrics.4")
def test_a_cluster_reports_a_request_in_metrics_logs_and_traces(pdserve: Pdserve) -> None:
    with http_collector(Collector()) as collector:
        endpoint = f"http://127.0.0.1:{collector.port}/v1/traces"
        up = pdserve.up("--log-format", "json", "--otlp-traces-endpoint", endpoint)
        assert up.returncode == 0, up.stderr
        request_id = _ask(pdserve)
        metrics = pdserve.client.get("/metrics").body.decode()
        assert pdserve("down").returncode == 0

    reported = {line.partition("{")[0] for line in metrics.splitlines() if line.startswith("vllm:")}
    assert {f"vllm:{name}" for name in NAMES} - reported == set()
    assert 'vllm:generation_tokens_total{engine="cluster",model_name="tiny"} 6.0' in metrics
    assert 'vllm:request_success_total{engine="cluster",finished_reason="length",model_name="tiny"} 1.0' in metrics
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in metrics

    folder, names = pdserve.folder.path / "logs", ("scheduler", "prefill-0", "decode-0")
    logs = {name: _events(folder / f"{name}.log") for name in names}
    assert all({"time", "level", "component", "event"} <= event.keys() for events in logs.values() for event in events)
    (done,) = [event for event in logs["scheduler"] if event["event"] == "request_done"]
    assert (done["request_id"], done["path"], done["output_tokens"]) == (request_id, "handoff", 6)

    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"llm_request", "queue", "reserve", "prefill", "send", "first_step", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["llm_request"].parent_span_id.hex() == PARENT
    where = {pair.key: pair.value.string_value for pair in spans["send"].attributes}
    assert where["pdserve.instance"].startswith("prefill-")
    assert where["pdserve.to_instance"].startswith("decode-")
