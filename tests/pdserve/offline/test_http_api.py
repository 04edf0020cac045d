"""Requests to a server: retries of a busy one, its refusals as our errors, the model by its name."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from batch.backend import NO_HEADERS, Answer
from pdserve.offline.http_api import HttpApi
from pdserve.offline.sources import AdaptiveBackend
from wire.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
)

pytestmark = pytest.mark.anyio

BUSY = Answer(429, {"retry-after": "3"}, b'{"error": {"message": "the queue is full"}}')
GOOD = Answer(200, {}, b'{"ok": true}')
CARD = {"id": "tiny", "root": "/models/tiny", "max_model_len": 512}


class Script:
    """An `Answerer` that returns scripted answers in turn, and records the requests."""

    def __init__(self, *answers: Answer | PdserveError) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, str, Any]] = []

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        self.requests.append((method, path, json.loads(body) if body else None))
        answer = self._answers.pop(0)
        if isinstance(answer, PdserveError):
            raise answer
        return answer


class Sleeps:
    """Records the time of each sleep, without sleeping."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


def answer(status: int, **body: Any) -> Answer:
    return Answer(status, {}, json.dumps(body).encode())


async def test_a_busy_or_lost_server_is_retried_after_its_retry_after() -> None:
    script, sleeps = Script(BUSY, Unavailable("nobody"), answer(503), GOOD), Sleeps()

    assert await HttpApi(script, retry_for_s=60, sleep=sleeps).post("/x", {"a": 1}) == {"ok": True}
    assert script.requests == [("POST", "/x", {"model": "", "a": 1})] * 4
    assert [seconds >= 3 for seconds in sleeps.slept] == [True, False, False]
    assert 0.25 <= sleeps.slept[1] <= 0.5


@pytest.mark.parametrize("reported", ["", "soon", "\u00b2", "-3", "1.5", "9" * 400])
async def test_an_invalid_retry_after_counts_as_none(reported: str) -> None:
    script, sleeps = Script(Answer(429, {"retry-after": reported}, b"{}"), GOOD), Sleeps()

    await HttpApi(script, retry_for_s=60, sleep=sleeps).get_json("/x")

    assert [seconds <= 0.25 for seconds in sleeps.slept] == [True]


async def test_the_retry_limit_counts_from_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    class Slow(Script):
        async def send(self, *requested: Any, **more: Any) -> Answer:
            nonlocal now
            now += 1000.0
            return await super().send(*requested, **more)

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)
    api = HttpApi(Slow(BUSY, GOOD), retry_for_s=60, sleep=Sleeps())

    assert await api.get_json("/x") == {"ok": True}


@pytest.mark.parametrize("last", [BUSY, Unavailable("nobody")])
async def test_without_time_left_the_last_error_is_raised(last: Answer | PdserveError) -> None:
    script = Script(last)

    with pytest.raises(Overloaded if isinstance(last, Answer) else Unavailable, match=r"the queue is full|nobody"):
        await HttpApi(script, retry_for_s=0).get_json("/x")
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidRequest), (413, InvalidRequest), (401, ConfigError), (500, InternalError), (504, DeadlineExceeded)],
)
async def test_a_refusal_is_our_error_with_the_servers_message(status: int, error: type[PdserveError]) -> None:
    script = Script(answer(status, error={"message": "in words"}))

    with pytest.raises(error, match="in words"):
        await HttpApi(script, retry_for_s=0).post("/x", {})
    assert len(script.requests) == 1


async def test_the_model_is_the_first_or_the_named_one() -> None:
    first = HttpApi(Script(answer(200, data=[CARD])), retry_for_s=0)
    await first.choose("")
    named = Script(answer(200, data=[CARD]), answer(200, **CARD))
    await HttpApi(named, retry_for_s=0).choose("facebook/opt 125m")

    assert (first.model, first.root, first.max_model_len) == ("tiny", "/models/tiny", 512)
    assert named.requests[1][1] == "/v1/models/facebook/opt%20125m"


async def test_an_unknown_model_is_refused_with_the_served_ones() -> None:
    script = Script(answer(200, data=[CARD]), answer(404, error={"message": "no"}))

    with pytest.raises(ConfigError, match="the model 'big' is not served, only 'tiny'"):
        await HttpApi(script, retry_for_s=0).choose("big")


async def test_a_refused_key_names_the_sources_of_keys() -> None:
    script = Script(answer(401, error={"message": "this server requires a key"}))

    with pytest.raises(ConfigError, match=r"this server requires a key \(LLM\(api_key=...\), or PDSERVE_API_KEY\)"):
        await HttpApi(script, retry_for_s=0).choose("")


@pytest.mark.parametrize(
    "reported",
    [
        Answer(404, {}, b"<!DOCTYPE HTML>\n<html>"), Answer(200, {}, b"<html>"), Answer(405, {}, b""),
        answer(200, data=[]), answer(200, models=["a"]), answer(200, data=[{"id": "tiny"}]),
    ],
)  # fmt: skip
async def test_a_foreign_server_is_reported_as_foreign(reported: Answer) -> None:
    with pytest.raises(ConfigError, match=r"^GET /v1/models lists no model .* must be the URL of") as message:
        await HttpApi(Script(reported), retry_for_s=0).choose("")

    assert "html" not in str(message.value)


async def test_a_busy_cluster_gets_fewer_concurrent_requests() -> None:
    class Small:
        """Answers four at once, and refuses the others."""

        def __init__(self) -> None:
            self.now = self.turned_away = 0

        async def send(
            self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
        ) -> Answer:  # fmt: skip
            if self.now == 4:
                self.turned_away += 1
                return Answer(429, {}, b"{}")
            self.now += 1
            for _ in range(9):
                await asyncio.sleep(0)
            self.now -= 1
            return Answer(200, {}, b"{}")

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    small = Small()
    api = HttpApi(AdaptiveBackend(small, 64), retry_for_s=1000.0, sleep=at_once)

    await asyncio.gather(*(api.post("/v1/completions", {}) for _ in range(300)))

    assert 0 < small.turned_away < 150
