"""CORS: no origin by default, only configured ones, and preflight requests without a key."""

import json

import pytest

from scheduler.api.cors import with_cors
from scheduler.app import build_app
from scheduler.config import SchedulerOptions, parse
from tests.scheduler.conftest import Serve
from tests.scheduler.mixed_ends import exchange_for
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio
PREFLIGHT = {"origin": "https://app.example", "access-control-request-method": "POST"}


async def test_no_origin_is_allowed_by_default(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.client.get("/v1/models", headers={"origin": "https://app.example"})
        preflight = await served.client.options("/v1/models", headers=PREFLIGHT)

    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert preflight.status_code == 405


@pytest.mark.covers("B.headers.2")
async def test_configured_origins_are_allowed(serve: Serve) -> None:
    async with serve(allowed_origins=("https://app.example",)) as served:
        preflight = await served.client.options("/v1/completions", headers=PREFLIGHT)
        answer = await served.client.get("/v1/models", headers={"origin": "https://app.example"})
        disallowed = await served.client.get("/v1/models", headers={"origin": "https://evil.example"})

    assert preflight.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in disallowed.headers


async def test_a_stream_from_our_own_server_has_cors_headers_too(serve: Serve) -> None:
    async with serve(allowed_origins=("https://app.example",)) as served:
        exchange, pipe = exchange_for("/v1/completions", [(b"origin", b"https://app.example")])
        exchange.feed(json.dumps({"model": served.model, "prompt": "hi", "stream": True}).encode())
        exchange.complete_body()
        await exchange.run(build_app(served.context))

    assert b"\r\naccess-control-allow-origin: https://app.example\r\n" in pipe.written
    assert pipe.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_lists_are_json_as_in_vllm() -> None:
    options = parse(["--model", "m", "--allowed-origins", '["a","b"]', "--allowed-methods", "GET"]).options

    assert (options.allowed_origins, options.allowed_methods) == (("a", "b"), ("GET",))


@pytest.mark.parametrize("origins", [(), ("*",)])
def test_credentials_need_origins_by_name(origins: tuple[str, ...]) -> None:
    async def app(*_: object) -> None: ...

    with pytest.raises(ConfigError, match="--allow-credentials"):
        with_cors(app, SchedulerOptions(allow_credentials=True, allowed_origins=origins))


@pytest.mark.parametrize("text", ["[1]", "[", '[["a"]]'])
def test_a_value_that_is_not_a_list_of_texts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a JSON list of strings"):
        parse(["--model", "m", "--allowed-origins", text])
