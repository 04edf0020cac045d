"""GET /v1/models, /health, /ready and /metrics."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from scheduler.app_context import ReadyReport
from scheduler.finished_requests import FinishedRequests
from scheduler.observability.metrics import Metrics
from scheduler.request import PromptDone
from scheduler.view import ClusterView, InstanceView, RetryView
from wire.errors import HandoffFailed
from wire.load import LinkStatus, LoadSnapshot
from wire.types import Role, StageTimes

pytestmark = pytest.mark.anyio


@pytest.mark.covers("A11.4")
async def test_a_model_card_names_the_model_as_typed(serve: Any) -> None:
    async with serve() as served:
        cards = (await served.client.get("/v1/models")).json()

        assert cards.pop("object") == "list"
        assert cards.pop("data") == [
            {
                "id": served.model, "object": "model", "created": served.context.created, "owned_by": "pdserve",
                "root": served.model, "parent": None, "max_model_len": 512, "permission": [], "type": "model",
                "display_name": served.model, "lifecycle": "active", "max_input_tokens": 512, "max_tokens": 512,
                "created_at": datetime.fromtimestamp(served.context.created, UTC).isoformat(),
            }
        ]  # fmt: skip
        assert cards == {"has_more": False, "first_id": served.model, "last_id": served.model}


async def test_served_names_and_the_model_as_typed_are_all_accepted(serve: Any, model_folder: Any) -> None:
    async with serve(names=("a", "b")) as served:
        listed = [card["id"] for card in (await served.client.get("/v1/models")).json()["data"]]
        for name in ("a", "b", str(model_folder)):
            card = await served.client.get(f"/v1/models/{name}")
            answer = await served.client.post("/v1/completions", json={"model": name, "prompt": "hi"})

            assert (card.json()["id"], card.json()["root"]) == (name, str(model_folder))
            assert answer.json()["model"] == name
        unknown = await served.client.get("/v1/models/c")

        assert listed == ["a", "b"]
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


_TEXT = {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", _TEXT), ("/v1/completions", _TEXT | {"model": None}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"input": "hi"}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"]}), ("/score", {"data_1": "a", "data_2": "b"}),
        ("/tokenize", _TEXT),
    ],
)  # fmt: skip
async def test_a_body_without_model_is_served_by_the_one_model(serve: Any, path: str, body: Any) -> None:
    async with serve(names=("a", "b")) as served:
        answer = await served.client.post(path, json=body)

        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", "a") == "a"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (_TEXT, "text_completion"), ({"messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
        ({"input": "hi"}, "list"), ({"text_1": "a", "text_2": "b"}, "list"), ({"queries": "a", "items": "b"}, "list"),
    ],
)  # fmt: skip
async def test_invocations_answer_as_the_route_of_the_body(serve: Any, body: Any, kind: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/invocations", json=body)

        assert (answer.status_code, answer.json()["object"]) == (200, kind), answer.text


async def test_invocations_of_no_known_body_are_400(serve: Any) -> None:
    async with serve() as served:
        for body in ({}, {"x": 1}):
            error = (await served.client.post("/invocations", json=body)).json()["error"]

            assert error["message"].startswith("the body has none of messages, prompt, input, text_1")


@pytest.mark.covers("B.ops.1")
@pytest.mark.parametrize(("reason", "status"), [(None, 200), ("the engine made no progress for 11 s", 503)])
async def test_health_is_the_state_of_the_process_itself(serve: Any, reason: str | None, status: int) -> None:
    async with serve(health=lambda: reason) as served:
        response = await served.client.get("/health")

        assert response.status_code == status
        assert response.json()["status"] == (reason or "ok")


async def test_ready_names_what_is_missing(serve: Any) -> None:
    report = ReadyReport(False, ("decode-0 at 127.0.0.1:8089",), {"instances": []})
    async with serve(readiness=report) as served:
        response = await served.client.get("/ready")

        assert response.status_code == 503
        assert response.json() == {
            "ready": False, "missing": ["decode-0 at 127.0.0.1:8089"], "instances": [],
        }  # fmt: skip


async def test_draining_ends_readiness_but_not_health(serve: Any) -> None:
    async with serve() as served:
        before = (await served.client.get("/ready")).status_code
        served.context.drain.begin()
        after, health = await served.client.get("/ready"), await served.client.get("/health")

        assert (before, after.status_code, health.status_code) == (200, 503, 200)
        assert after.json()["missing"] == ["the server is shutting down"]


async def test_requests_are_counted_under_fixed_labels(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": "hi"}
        await served.client.post("/v1/completions", json=body)
        await served.client.post("/v1/completions", json=body | {"stream": True})
        await served.client.post("/v1/completions", json={})
        for number in range(5):
            await served.client.request(f"M{number}", f"/path/{number}")
        text = (await served.client.get("/metrics")).text

        assert 'pdserve_http_requests_total{method="POST",route="/v1/completions",status="200"} 2.0' in text
        assert 'pdserve_http_requests_total{method="POST",route="/v1/completions",status="400"} 1.0' in text
        assert 'pdserve_http_requests_total{method="other",route="other",status="404"} 5.0' in text
        assert "pdserve_time_to_first_token_seconds_count 2.0" in text
        assert "pdserve_inter_token_latency_seconds_count 2.0" in text
        assert "pdserve_kv_hop_bytes_sum 8192.0" in text
        assert 'pdserve_request_endings_total{ending="finished"} 2.0' in text


def test_gauges_show_every_instance_with_probes_apart() -> None:
    links = (LinkStatus("d0", "shm", "up", 1, 10, 0), LinkStatus("d1", "tcp", "down", 1, 0, 3))
    load = LoadSnapshot(
        blocks_total=100, blocks_used=7, blocks_probe=2, blocks_cached=30, running=3, waiting=1, uncomputed_tokens=9,
        held_prompts=1, progress_age_s=0.5, kv_bytes_sent=4096, links=links, slowest_turn_s=0.25, starved_s=1.5,
        kv_frames_corrupt=5, kv_frames_resent=4, kv_frames_dropped=3, kv_frames_duplicate=2, kv_links_refused=1,
        prefix_tokens_sought=96, prefix_tokens_found=64, blocks_swapped=12, images_waiting=1, image_cache_bytes=512,
        images_sought=4, images_found=3, images_encoded=2,
    )  # fmt: skip
    living = InstanceView(0, "prefill-0", Role.PREFILL, "127.0.0.1:8088", "living", "", None, load)
    lost = InstanceView(1, "decode-0", Role.DECODE, "127.0.0.1:8089", "lost", "went silent", None, None)
    ledger = FinishedRequests(10, 5, 1, 2, 4, 1, retried_tokens=90, delayed_retries=6, without_decode=11)
    view = ClusterView(
        True, (living, lost), ledger, queued_prompts=3, queued_tokens=300, retries=RetryView(7, 8, 9),
        roles_gone={Role.DECODE}, may_lack={Role.DECODE},
    )  # fmt: skip

    text = Metrics(lambda: view).render().decode()

    values = dict(re.findall(r'^pdserve_(\w+)\{instance="127\.0\.0\.1:8088"\} (\S+)$', text, re.M))
    assert {name: float(value) for name, value in values.items()} == {
        "kv_blocks_used": 5, "kv_blocks_probe": 2, "kv_blocks_cached": 30, "kv_blocks_total": 100, "running": 3,
        "waiting": 1, "held_prompts": 1, "uncomputed_tokens": 9, "progress_age_seconds": 0.5,
        "slowest_turn_seconds": 0.25, "starved_seconds_total": 1.5, "decoding": 0, "step_base_seconds": 0,
            "gap_limit_seconds": 0,
        "step_sequence_seconds": 0, "step_token_seconds": 0,
        "kv_bytes_sent_total": 4096, "kv_bytes_received_total": 0, "preemptions_total": 0, "steps_total": 0,
        "step_seconds_total": 0, "tokens_computed_total": 0,
        "kv_frames_corrupt_total": 5, "kv_frames_resent_total": 4, "kv_frames_dropped_total": 3,
        "kv_frames_duplicate_total": 2, "kv_links_refused_total": 1,
        "prefix_tokens_sought_total": 96, "prefix_tokens_found_total": 64, "prefix_tokens_found_decoded_total": 0,
        "kv_blocks_swapped": 12, "table_agrees": 1,
        "prompts_recomputed_total": 0, "images_waiting": 1, "image_cache_bytes": 512,
        "images_sought_total": 4, "images_found_total": 3, "images_encoded_total": 2,
    }  # fmt: skip
    assert (
        'pdserve_instance_info{address="127.0.0.1:8089",engine="",instance="127.0.0.1:8089",kv_digests="",'
        'name="decode-0",role="decode",state="lost"} 1' in text
    )
    assert 'pdserve_link_up{instance="127.0.0.1:8088",peer="d1",transport="tcp"} 0.0' in text
    assert "pdserve_requests_received_total 10.0" in text
    assert "pdserve_requests_inflight 2.0" in text
    assert "pdserve_queued_prompts 3.0" in text
    assert "pdserve_ready 1.0" in text
    assert "pdserve_retries_delayed_total 6.0" in text
    assert "pdserve_tokens_retried_total 90.0" in text
    assert re.findall(r"^pdserve_(role_gone|prompts_served_without_role_total)(\{.*\}) (\S+)$", text, re.M) == [
        ("prompts_served_without_role_total", '{role="prefill"}', "0.0"),
        ("prompts_served_without_role_total", '{role="decode"}', "11.0"),
        ("role_gone", '{role="prefill",when_gone="fail"}', "0.0"),
        ("role_gone", '{role="decode",when_gone="local"}', "1.0"),
    ]  # fmt: skip
    assert re.findall(r"^pdserve_retries_(inflight|waiting|limit) (\S+)$", text, re.M) == [
        ("inflight", "7.0"), ("waiting", "8.0"), ("limit", "9.0"),
    ]  # fmt: skip


def _link_samples(*links: LinkStatus) -> dict[str, float]:
    """Return the samples of links as a scheduler would export them, by name and labels."""
    load = LoadSnapshot(blocks_total=10, links=links)
    view = ClusterView(
        True, (InstanceView(0, "prefill-0", Role.PREFILL, "p", "living", "", None, load),), _NO_REQUESTS, 0, 0
    )
    found = re.findall(r"^pdserve_link_(\w+\{.*\}) (\S+)$", Metrics(lambda: view).render().decode(), re.M)
    assert len(found) == len(dict(found)), "a sample stands twice"
    return {name: float(value) for name, value in found}


_NO_REQUESTS = FinishedRequests()


def test_a_link_that_fell_back_shows_the_reason() -> None:
    link = LinkStatus(
        "d0", "tcp", "up", 7, 10, failures=2, fallbacks=1, round_trip_s=0.00025, bytes_per_s=3e9,
        passed_over=(
            "shm: another host: b", 'process_group: "x"\\\n y' + "z" * 500,
            "mooncake: slower than tcp (1.23 GB/s against 2.00 GB/s)",
        ),
    )  # fmt: skip

    samples = _link_samples(link)

    pair, over = 'instance="p",peer="d0"', 'instance="p",peer="d0",transport="tcp"'
    reasons = [name for name in samples if name.startswith("passed_over")]
    assert {name: value for name, value in samples.items() if name not in reasons} == {
        f"up{{{over}}}": 1, f"round_trip_seconds{{{over}}}": 0.00025, f"bandwidth_bytes_per_second{{{over}}}": 3e9,
        f"failures_total{{{pair}}}": 2, f"fallbacks_total{{{pair}}}": 1,
    }  # fmt: skip
    assert 'passed_over{instance="p",peer="d0",reason="another host: b",transport="shm"}' in reasons
    slower = 'passed_over{instance="p",peer="d0",reason="slower than tcp",transport="mooncake"}'
    assert slower in reasons, "each measurement would make another time series"
    assert max(map(len, reasons)) < 260


def test_a_restarted_peer_is_one_sample_without_figures() -> None:
    for states in (("lost", "up"), ("up", "lost")):
        links = [LinkStatus("d0", "tcp", state, 1, 1, failures=2, fallbacks=3) for state in states]

        samples = _link_samples(*links)

        assert samples == {
            'up{instance="p",peer="d0",transport="tcp"}': 1,
            'failures_total{instance="p",peer="d0"}': 4, 'fallbacks_total{instance="p",peer="d0"}': 6,
        }  # fmt: skip


def test_the_overlap_is_a_pair_of_counters_and_a_ratio() -> None:
    metrics = Metrics()
    for early in (750, 1000):
        times = StageTimes(send_s=0.002, kv_bytes=1000, transport="shm", kv_bytes_early=early)
        metrics.counters.prompt_done(PromptDone(0, "handoff", "", "p", "d", times))
    metrics.counters.prompt_done(PromptDone(0, "local", "", None, "c", StageTimes()))

    text = metrics.render().decode()

    assert "pdserve_kv_handoff_bytes_total 2000.0" in text
    assert "pdserve_kv_handoff_early_bytes_total 1750.0" in text
    assert "pdserve_kv_overlap_ratio_sum 1.75" in text
    assert 'pdserve_kv_overlap_ratio_bucket{le="0.75"} 1.0' in text
    assert 'pdserve_kv_hop_seconds_bucket{le="0.0025"} 2.0' in text


async def test_latencies_count_from_the_requests_arrival(serve: Any) -> None:
    async with serve() as served:
        loop = asyncio.get_running_loop()
        body = json.dumps({"model": served.model, "prompt": "hi"}).encode()
        began: list[float] = []

        async def slowly() -> AsyncIterator[bytes]:
            began.append(loop.time())
            yield body[:5]
            while loop.time() - began[0] < 0.05:  # noqa: ASYNC110 - time itself is what is tested
                await asyncio.sleep(0.01)
            yield body[5:]

        await served.client.post("/v1/completions", content=slowly(), headers={"content-type": "application/json"})
        text = (await served.client.get("/metrics")).text

    for name in ("time_to_first_token", "e2e_request_latency"):
        (total,) = re.findall(rf"^pdserve_{name}_seconds_sum (\S+)$", text, re.M)
        assert float(total) >= 0.05


async def test_each_finished_request_is_one_log_line_for_the_operator(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pdserve.requests")
    async with serve("hello world") as served:
        body = {"model": served.model, "prompt": ["quick fox", "lazy dog"], "n": 2}
        answer = (await served.client.post("/v1/completions", json=body)).json()
        served.dispatcher.fail_after, served.dispatcher.error = 1, HandoffFailed("broken")
        await served.client.post("/v1/completions", json=body)

    done, failed = [record.getMessage() for record in caplog.records if record.name == "pdserve.requests"]
    assert f"request_done request_id={answer['id']} ending=finished path=handoff prefill=prefill-0" in done
    assert "decode=decode-0 prompts=2 n=2" in done
    assert f"output_tokens={answer['usage']['completion_tokens']} " in done
    assert (
        "queue_ms=1.0 reserve_ms=2.0 encode_ms=- prefill_ms=100.0 send_ms=10.0 first_step_ms=20.0 kv_bytes=8192" in done
    )
    assert "ending=failed path=- " in failed
    assert not any(word in done for word in ("quick", "lazy", "hello"))
