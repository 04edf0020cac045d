"""A trace of each request: its stages as they were measured, under the client's own trace if there is one."""

import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from scheduler.app import build_app
from scheduler.config import parse
from scheduler.observability.request_done import RequestDone
from scheduler.observability.trace_spans import MAX_PROMPTS, spans_of
from scheduler.observability.traces import Traces, check_traces, open_traces
from scheduler.request import GenerationRequest, PromptDone
from telemetry.spans import Span, TraceContext
from testing.scheduler.scripted_dispatcher import ScriptedDispatcher
from tests.telemetry.collector import Collector, grpc_collector, http_collector
from wire.errors import ConfigError, InstanceLost
from wire.types import SamplingParams, StageTimes

MS = 1_000_000
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMES = StageTimes(
    queue_s=0.01, reserve_s=0.02, encode_s=0.0, prefill_s=0.3, send_s=0.04, first_step_s=0.05, kv_bytes=4096,
    transport="shm", kv_bytes_early=1024, cached_tokens=16,
)  # fmt: skip


def _done(*served: PromptDone, prompts: int = 1, **changes: Any) -> RequestDone:
    request = GenerationRequest("cmpl-1", ((1, 2, 3),) * prompts, SamplingParams(max_tokens=8), 30.0, 10.0)
    done = RequestDone(
        request, served, "finished", 2.0, dispatched_s=0.1, first_token_s=0.5, last_token_s=1.9, num_output_tokens=5,
        reasons=("stop",),
    )  # fmt: skip
    return dataclasses.replace(done, **changes)


def _served(prompt: int = 0, **changes: Any) -> PromptDone:
    return dataclasses.replace(PromptDone(prompt, "handoff", "", "prefill-0", "decode-0", TIMES), **changes)


def _spans(done: RequestDone, context: TraceContext | None = None) -> list[Span]:
    numbers = itertools.count(1)
    return spans_of(done, 10_000 * MS, context, model="m", new_id=lambda size: next(numbers).to_bytes(size))


def test_stages_follow_each_other_with_their_measured_durations() -> None:
    request, *stages = _spans(_done(_served()))

    assert (request.start_ns, request.end_ns) == (8000 * MS, 10_000 * MS)
    assert [(span.name, span.start_ns // MS - 8000, span.end_ns // MS - 8000) for span in stages] == [
        ("queue", 100, 110), ("reserve", 110, 130), ("encode", 130, 130), ("prefill", 130, 430), ("send", 430, 470),
        ("first_step", 470, 520), ("decode", 500, 1900),
    ]  # fmt: skip
    assert {span.parent_id for span in stages} == {request.span_id}
    assert {span.trace_id for span in stages} == {request.trace_id}
    assert len({span.span_id for span in stages}) == len(stages)


def test_each_stage_names_its_instance() -> None:
    stages = {span.name: span.attributes for span in _spans(_done(_served()))}

    where = {name: reported.get("pdserve.instance") for name, reported in stages.items()}
    assert where == {
        "llm_request": None, "queue": None, "reserve": "decode-0", "encode": "prefill-0", "prefill": "prefill-0",
        "send": "prefill-0", "first_step": "decode-0", "decode": None,
    }  # fmt: skip
    assert stages["send"]["pdserve.to_instance"] == "decode-0"
    assert (stages["send"]["pdserve.kv_bytes"], stages["send"]["pdserve.kv_bytes_early"]) == (4096, 1024)
    assert stages["prefill"]["pdserve.cached_tokens"] == 16


def test_the_request_span_has_vllms_attribute_names() -> None:
    reported = _spans(_done(_served()))[0].attributes

    assert reported["gen_ai.request.id"] == "cmpl-1"
    assert (reported["gen_ai.usage.prompt_tokens"], reported["gen_ai.usage.completion_tokens"]) == (3, 5)
    assert reported["gen_ai.response.finish_reasons"] == ("stop",)
    assert reported["gen_ai.latency.time_to_first_token"] == 0.5
    assert reported["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.39)
    assert reported["pdserve.path"] == ("handoff",)


def test_a_local_path_has_only_its_own_stages() -> None:
    times = StageTimes(queue_s=0.01, prefill_s=0.3)

    spans = _spans(_done(_served(path="local", prefill_instance=None, decode_instance="combined-0", times=times)))

    assert [span.name for span in spans] == ["llm_request", "queue", "prefill", "decode"]
    assert spans[2].attributes["pdserve.instance"] == "combined-0"


def test_only_the_first_of_many_prompts_are_traced() -> None:
    spans = _spans(_done(*(_served(prompt) for prompt in reversed(range(40))), prompts=40))

    prompts = {span.attributes["pdserve.prompt"] for span in spans if "pdserve.prompt" in span.attributes}
    assert prompts == set(range(MAX_PROMPTS))
    assert spans[0].attributes["pdserve.prompts"] == 40


def test_a_retried_prompt_is_counted() -> None:
    once, again = (_spans(_done(_served(tries=tries)))[0].attributes["pdserve.retried_prompts"] for tries in (1, 2))

    assert (once, again) == (0, 1)


def test_a_failure_is_an_error_and_a_disconnected_client_is_not() -> None:
    failed = _spans(_done(outcome="failed", error="InstanceLost", first_token_s=None, last_token_s=None, reasons=()))
    cancelled = _spans(_done(outcome="cancelled", first_token_s=None, last_token_s=None))

    assert [span.error for span in failed] == ["InstanceLost"]
    assert [(span.error, span.attributes["pdserve.ending"]) for span in cancelled] == [("", "cancelled")]


@asynccontextmanager
async def _client(serve: Any, port: int, path: str = "/v1/traces", answer: str = "hello world") -> AsyncIterator[Any]:
    """A client of a scheduler that exports to the collector on `port`, and what is behind it."""
    async with serve(answer) as served:
        traces = open_traces(f"http://127.0.0.1:{port}{path}", {}, model="m")
        assert traces is not None
        app = build_app(dataclasses.replace(served.context, traces=traces))
        try:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield client, served, traces
        finally:
            traces.close()


def _by_name(collector: Collector) -> dict[str, SpanMessage]:
    return {span.name: span for span in collector.spans}


@pytest.mark.anyio
@pytest.mark.parametrize(("collecting", "path"), [(http_collector, "/v1/traces"), (grpc_collector, "")])
async def test_a_clients_trace_is_continued(serve: Any, collecting: Any, path: str) -> None:
    with collecting(Collector()) as collector:
        async with _client(serve, collector.port, path) as (client, served, _):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "k=v"}
            body = {"model": served.model, "prompt": "hi", "stream": True}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    spans = _by_name(collector)
    assert set(spans) == {"llm_request", "queue", "reserve", "prefill", "send", "first_step", "decode"}
    request = spans["llm_request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex(), request.trace_state) == (TRACE, PARENT, "k=v")
    (passed_on,) = served.dispatcher.requests
    assert passed_on.traceparent == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert request.kind == SpanMessage.SPAN_KIND_SERVER
    assert {span.trace_id for span in spans.values()} == {request.trace_id}
    durations = {name: span.end_time_unix_nano - span.start_time_unix_nano for name, span in spans.items()}
    assert (durations["prefill"], durations["send"]) == (100 * MS, 10 * MS)
    assert request.start_time_unix_nano <= spans["queue"].start_time_unix_nano


@pytest.mark.anyio
async def test_unsampled_traces_are_not_sent_and_no_parent_starts_one(serve: Any) -> None:
    with http_collector(Collector()) as collector:
        async with _client(serve, collector.port) as (client, served, _):
            body = {"model": served.model, "prompt": "hi"}
            for parent in (f"00-{TRACE}-{PARENT}-00", "nonsense"):
                await client.post("/v1/completions", json=body, headers={"traceparent": parent})

    requests = [span for span in collector.spans if span.name == "llm_request"]
    assert [bytes(span.parent_span_id) for span in requests] == [b""]
    assert requests[0].trace_id.hex() != TRACE


@pytest.mark.anyio
async def test_traces_contain_no_content(serve: Any) -> None:
    with http_collector(Collector()) as collector:
        async with _client(serve, collector.port, answer="xyzzy again") as (client, served, _):
            headers = {"authorization": "Bearer xyzzy"}
            await client.post("/v1/completions", json={"model": served.model, "prompt": "xyzzy"}, headers=headers)

    assert collector.spans
    assert b"xyzzy" not in b"".join(request.SerializeToString() for request in collector.requests)


@pytest.mark.anyio
async def test_a_failed_request_is_traced_and_metrics_count_what_was_sent(serve: Any) -> None:
    with http_collector(Collector()) as collector:
        async with _client(serve, collector.port) as (client, served, traces):
            dispatcher: ScriptedDispatcher = served.dispatcher
            dispatcher.fail_after, dispatcher.error = 1, InstanceLost("decode-0 was lost")
            await client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})
        assert traces.exporter.num_sent == len(collector.spans)

    assert _by_name(collector)["llm_request"].status.message == "InstanceLost"


@pytest.mark.anyio
async def test_requests_are_served_as_usual_if_no_collector_answers(serve: Any) -> None:
    async with _client(serve, 9) as (client, served, _):
        answer = await client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})

        assert answer.status_code == 200
        assert served.context.metrics.counters.outcomes == {"finished": 1}


def test_a_defect_of_a_trace_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def put(self, spans: object) -> None:
            raise RuntimeError("a defect")

    Traces(Broken(), model="m").export(_done(), None)  # type: ignore[arg-type]

    assert "trace_lost request_id=cmpl-1" in caplog.text


def test_an_invalid_endpoint_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: 'ftp://x' is not a collector's URL"):
        check_traces("ftp://x", {})


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.observability.traces.is_installed", lambda: False)

    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[otlp\]'"):
        check_traces("http://127.0.0.1:4317", {})


def test_the_flag_has_vllms_name() -> None:
    assert parse(["--model", "m", "--otlp-traces-endpoint", "http://c:4317"]).options.otlp_traces_endpoint
    assert check_traces(parse(["--model", "m"]).options.otlp_traces_endpoint, {}) is None
