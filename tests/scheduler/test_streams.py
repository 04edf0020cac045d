"""Streams that are kept: the client leaves, and continues them at another scheduler of the same instances."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flags.options import EngineOptions
from scheduler.api.resumed import SkippedEvents
from scheduler.config import SchedulerConfig, SchedulerOptions
from tests.scheduler.scheduler_pair import BODIES, COMPLETIONS, MESSAGES, USAGE, Client, Pair, pair
from wire.errors import ConfigError
from wire.messages import Prefill

pytestmark = pytest.mark.anyio


def content(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events without what differs between two runs of a request: ids, and how it was served."""
    return [
        {name: value for name, value in event.items() if name not in ("id", "created", "pdserve", "message")}
        for event in events
    ]


@pytest.mark.combinations(1)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("path", list(BODIES))
async def test_a_stream_continues_after_the_events_that_a_client_has(model_folder: Path, path: str, at: int) -> None:
    usage: dict[str, Any] = {} if path == MESSAGES else USAGE
    async with pair(model_folder) as served:
        undisturbed = served.post(path, keep=False, **usage)
        whole = await undisturbed.whole()
        assert "x-pdserve-stream" not in undisturbed.headers
        num_prefills = sum(isinstance(one, Prefill) and not one.prompt.probe for one in _commands(served))
        client = served.post(path, **usage)
        had = (await client.read(6))[:6]
        client.leave()
        resumed = served.resume(client.stream_id, 6, at=at)
        rest = await resumed.whole()

        assert content(had + rest) == content(whole)
        assert resumed.content.endswith((b"[DONE]\n\n", b'{"type":"message_stop"}\n\n'))
        assert resumed.stream_id == client.stream_id
        assert len({(event["id"], event.get("created")) for event in had + rest if "id" in event}) <= 1
        prefills = sum(isinstance(one, Prefill) and not one.prompt.probe for one in _commands(served))
        assert prefills == num_prefills + 1


def _commands(served: Pair) -> list[object]:
    return [command for instance in served.instances.instances for command in instance.commands]


async def test_a_stream_that_ended_meanwhile_is_replayed(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        client = served.post(COMPLETIONS)
        whole = await client.whole()
        resumed = served.resume(client.stream_id, 0)

        assert await resumed.whole() == whole
        assert await served.resume(client.stream_id, len(whole)).whole() == []


async def test_the_client_of_the_owner_before_gets_a_reason(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        served.instances.instances[1].behaviour.step_s = 0.02
        client = served.post(COMPLETIONS)
        await client.read(3)
        resumed = served.resume(client.stream_id, 3)
        events = await client.whole()
        rest = await resumed.whole()

        assert events[-1]["error"]["code"] == 409
        assert "another scheduler continues the stream" in events[-1]["error"]["message"]
        assert b"[DONE]" not in client.content
        assert content(rest)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("had", [0, 6, None])
async def test_usage_is_counted_once(model_folder: Path, had: int | None) -> None:
    async with pair(model_folder) as served:
        client = served.post(COMPLETIONS, **USAGE)
        if had is None:
            await client.whole()  # the connection breaks before the client has read its end
        else:
            await client.read(had or 1)
        client.leave()
        resumed = served.resume(client.stream_id, had or 0)
        usage = (await resumed.whole())[-1]["usage"]
        counted = await served.metrics()

        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 40)
        by_name = {name.partition("{")[0]: value for name, value in counted.items()}
        assert by_name["vllm:generation_tokens_total"] == 40
        assert by_name["vllm:prompt_tokens_total"] == 1
        endings = {name: value for name, value in counted.items() if "request_endings" in name and value}
        assert sum(value for name, value in endings.items() if "finished" in name) == 1, endings
        assert sum(value for name, value in endings.items() if "failed" in name) == 0


async def test_a_client_that_leaves_cancels_unless_it_keeps_its_stream(model_folder: Path) -> None:
    async with pair(model_folder, orphan_limit=0.3) as served:
        decode = served.instances.instances[1]
        decode.behaviour.step_s = 0.02
        for keep in (False, True):
            client = served.post(COMPLETIONS, keep=keep, max_tokens=400)
            await client.read(3)
            steps, now = decode.steps, asyncio.get_running_loop().time()
            client.leave()
            await served.freed()
            took = asyncio.get_running_loop().time() - now
            assert (took >= 0.3, decode.steps > steps + 5) == (keep, keep)
            if keep:
                resumed = served.resume(client.stream_id, 3)
                await resumed.whole()
                assert resumed.status == 404


async def test_a_stream_can_be_ended_by_another_request(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        served.instances.instances[1].behaviour.step_s = 0.02
        client = served.post(COMPLETIONS, max_tokens=400)
        await client.read(3)
        path = f"/v1/streams/{client.stream_id}"
        ended = list[Client]()
        for key in ("b", "a", "a"):
            ended.append(Client(served.schedulers[1].app, path, None, {}, key, method="DELETE"))
            await ended[-1].whole()
        await client.whole()
        await served.freed()

        assert [one.status for one in ended] == [404, 200, 404]
        assert client.events[-1]["error"]["code"] == 409


async def test_a_stream_can_be_resumed_again_and_again(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        served.instances.instances[1].behaviour.step_s = 0.005
        whole = await served.post(COMPLETIONS, keep=False).whole()
        client, had = served.post(COMPLETIONS), list[dict[str, Any]]()
        stream_id = ""
        for at in (1, 1, 0, 1):
            had += (await client.read(4))[:4]
            stream_id = stream_id or client.stream_id
            client.leave()
            client = served.resume(stream_id, len(had), at=at)
        had += await client.whole()

        assert content(had) == content(whole)


NOT_RESUMED = [
    ("0" * 32, 0, "a", 404, "never resumable"),
    ("{id}", 0, "b", 404, "never resumable"),
    ("{id}", 0, "c", 401, "API key"),
    ("no-id", 0, "a", 404, "no stream has the id"),
    ("{id}", -1, "a", 400, "after is '-1'"),
    ("{id}", "x", "a", 400, "after is 'x'"),
]


async def test_what_cannot_be_resumed_has_a_reason(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        client = served.post(COMPLETIONS)
        whole = await client.whole()
        for stream_id, after, key, status, message in NOT_RESUMED:
            refused = served.resume(stream_id.replace("{id}", client.stream_id), after, key=key)
            await refused.whole()
            error = json.loads(refused.content)["error"]
            assert (refused.status, message in error["message"]) == (status, True), error
            assert "x-pdserve-stream" not in refused.headers

        assert await served.resume(client.stream_id, 0).whole() == whole


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"stream": False}, "stream: true"),
    (COMPLETIONS, {"n": 2}, "one choice"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "one choice"),
    (COMPLETIONS, {"logprobs": 1}, "log probabilities"),
    (COMPLETIONS, {"logprobs": 1, "echo": True}, "log probabilities"),
    (COMPLETIONS, {"prompt": "a", "user": "x" * 2**20}, "limit for a kept stream"),
]


async def test_what_cannot_be_kept_is_refused(model_folder: Path) -> None:
    async with pair(model_folder) as served:
        for path, changes, message in REFUSED:
            client = served.post(path, **changes)
            await client.whole()
            assert (client.status, message in client.content.decode()) == (400, True), client.content
            if "logprobs" in changes:
                continue  # the simulated instances have none
            wanted = {"X-Pdserve-Keep-Stream": "if-possible"}
            possible = Client(served.schedulers[0].app, path, BODIES[path] | changes, wanted, "a")
            await possible.whole()
            assert (possible.status, "x-pdserve-stream" in possible.headers) == (200, False)
        odd = Client(served.schedulers[0].app, COMPLETIONS, BODIES[COMPLETIONS], {"X-Pdserve-Keep-Stream": "yes"}, "a")
        await odd.whole()
        assert (odd.status, b"must be true, false or" in odd.content) == (400, True)


async def test_without_an_orphan_limit_nothing_is_kept(model_folder: Path) -> None:
    async with pair(model_folder, orphan_limit=0.0) as served:
        client, resumed = served.post(COMPLETIONS), served.resume("0" * 32, 0)
        await client.whole()
        await resumed.whole()

        assert (client.status, resumed.status) == (400, 404)
        assert b"--orphan-limit 0" in client.content


def test_the_limit_has_a_bound(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="at most 3600"):
        SchedulerConfig(EngineOptions(model=str(model_folder)), SchedulerOptions(orphan_limit=3601.0))


class Written:
    """Records an answer."""

    def __init__(self) -> None:
        self.content = b""

    def start(self, status: int, headers: object) -> None:
        """Not used here."""

    def write(self, content: bytes) -> None:
        """Record a part."""
        self.content += content

    async def end(self, content: bytes) -> None:
        """Record the last part."""
        self.content += content


@pytest.mark.parametrize("num_events", range(5))
async def test_events_are_skipped_wherever_they_are_cut(num_events: int) -> None:
    written = Written()
    answer = SkippedEvents(written, num_events)  # type: ignore[arg-type]
    for part in (b"data: 1\n\ndata: 2\n\n", b": keep-alive\n\n", b"", b"event: ping\ndata: {}\n\n", b"data: 3\n\n"):
        answer.write(part)
    await answer.end(b"data: 4\n\ndata: [DONE]\n\n")

    shown = [line for line in written.content.decode().split("\n\n") if line.startswith("data: ")]
    assert shown == [*[f"data: {number}" for number in (1, 2, 3, 4)][num_events:], "data: [DONE]"]
