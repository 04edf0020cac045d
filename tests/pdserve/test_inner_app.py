"""The scheduler's HTTP API and its engine in one process, without a socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from flags.options import EngineOptions
from instance.local import LocalInstance
from pdserve.inner_app import inner_app
from scheduler.config import SchedulerOptions
from tests.engine.tiny_models import make_tiny_model
from wire.errors import ConfigError, InternalError, PdserveError

pytestmark = pytest.mark.anyio
WAIT_S = 300.0


def _options(folder: Path) -> EngineOptions:
    return EngineOptions(model=str(make_tiny_model("llama", folder)), dtype="float32", served_model_name=("tiny",))


async def test_it_answers_without_a_key_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-servers")
    children, tasks = set(psutil.Process().children()), asyncio.all_tasks()
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with (
        asyncio.timeout(WAIT_S),
        inner_app(_options(tmp_path), SchedulerOptions()) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://inner") as client,
    ):
        answer = await client.post("/v1/completions", json=body)
        models = await client.get("/v1/models")

    assert answer.status_code == 200
    assert answer.json()["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": None,
    }  # fmt: skip
    assert [card["id"] for card in models.json()["data"]] == ["tiny"]
    assert set(psutil.Process().children()) <= children
    assert asyncio.all_tasks() == tasks


async def test_a_lost_engine_ends_the_body_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Callable[[PdserveError], None]] = []
    start, tasks = LocalInstance.start, asyncio.all_tasks()

    async def overhear(config: object, on_lost: Callable[[PdserveError], None]) -> LocalInstance:
        reported.append(on_lost)
        return await start(config, on_lost)  # type: ignore[arg-type]

    async def lose() -> None:
        async with asyncio.timeout(WAIT_S), inner_app(_options(tmp_path), SchedulerOptions()):
            await asyncio.to_thread(reported[0], InternalError("a rank has died"))
            await asyncio.Event().wait()

    monkeypatch.setattr(LocalInstance, "start", overhear)

    with pytest.raises(InternalError, match="a rank has died"):
        await lose()

    await asyncio.sleep(0)  # the cancellation leaves nothing on this task
    assert asyncio.all_tasks() == tasks


async def test_a_template_that_does_not_compile_is_reported_first(tmp_path: Path) -> None:
    async def open_it() -> None:
        options = SchedulerOptions(chat_template="{% for message in messages %}")
        async with asyncio.timeout(WAIT_S), inner_app(_options(tmp_path), options):
            await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="--chat-template"):
        await open_it()


async def test_a_missing_engine_package_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    async def open_it() -> None:
        async with asyncio.timeout(WAIT_S), inner_app(_options(tmp_path), SchedulerOptions()):
            raise AssertionError("it opened")

    monkeypatch.setattr("instance.local.build_engine", build)

    with pytest.raises(ConfigError, match=r"torch is missing\): pip install 'pdserve\[engine\]'"):
        await open_it()
