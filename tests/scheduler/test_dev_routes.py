"""--enable-dev-routes: /server_info and /reset_prefix_cache; and --enable-per-request-metrics."""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.covers("B.ops.8")
@pytest.mark.parametrize(("method", "path"), [("GET", "/server_info"), ("POST", "/reset_prefix_cache")])
async def test_they_are_served_by_flag_alone(serve: Any, method: str, path: str) -> None:
    async with serve() as served:
        assert (await served.client.request(method, path)).status_code == 404


@pytest.mark.covers("B.ops.8")
async def test_a_reset_gives_all_later_requests_another_salt(serve: Any) -> None:
    bodies = [
        ("/v1/completions", {"prompt": "hi"}), ("/v1/completions", {"prompt": "hi", "cache_salt": "mine"}),
        ("/v1/embeddings", {"input": "hi"}),
    ]  # fmt: skip
    async with serve(enable_dev_routes=True) as served:
        for _ in range(2):
            for path, body in bodies:
                assert (await served.client.post(path, json=body)).status_code == 200
            reset = await served.client.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            assert (reset.status_code, reset.json()) == (200, {"success": True})

        salts = [request.cache_salt for request in served.dispatcher.requests]

    assert salts[0] == ""  # without a reset, keys or salts, nothing is separated
    assert len(set(salts)) == 4  # before and after: with and without a salt of the client
    assert (salts[2], salts[5]) == (salts[0], salts[3])


@pytest.mark.covers("B.ops.8")
@pytest.mark.parametrize("form", ["text", "json"])
async def test_server_info_has_the_flags_without_secrets(
    serve: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-hidden")
    monkeypatch.setenv("PDSERVE_SEEN", "this")
    async with serve(enable_dev_routes=True, api_key=("sk-hidden",), max_prompts=63) as served:
        response = await served.client.get("/server_info", params={"config_format": form})
        refused = await served.client.get("/server_info?config_format=yaml")

    info = response.json()
    assert "sk-hidden" not in response.text
    assert info["vllm_env"]["PDSERVE_SEEN"] == "this"
    assert set(info["system_env"]) == {"pdserve", "python", "platform", "packages"}
    if form == "json":
        assert info["vllm_config"]["scheduler"]["max_prompts"] == 63
    else:
        assert "'max_prompts': 63" in info["vllm_config"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")


@pytest.mark.covers("B.usage.6")
@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": CHAT})],
)
async def test_answers_have_the_requests_times_by_flag(serve: Any, path: str, prompt: dict[str, Any]) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with serve("hello world", enable_per_request_metrics=True) as served:
        whole = (await served.client.post(path, json=prompt)).json()
        stream = await served.client.post(path, json=prompt | streamed)
        short = await served.client.post(path, json=prompt | streamed | {"max_tokens": 1})
        two = (await served.client.post(path, json=prompt | {"n": 2, "temperature": 1})).json()
    async with serve("hello world") as served:
        without = (await served.client.post(path, json=prompt)).json()

    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n")[:-2]]
    for metrics in (whole["metrics"], chunks[-1]["metrics"]):
        assert metrics["queue_time_ms"] == 1.0  # the scripted cluster's
        assert metrics["tokens_per_second"] > 0
        assert set(metrics) == {
            "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        }  # fmt: skip
    assert not any("metrics" in chunk for chunk in chunks[:-1])
    assert "mean_itl_ms" not in json.loads(short.text.split("\n\n")[-3].removeprefix("data: "))["metrics"]
    assert (two["metrics"], without["metrics"]) == (None, None)
