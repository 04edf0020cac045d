"""A check before the load reports with a message what is wrong with the server."""

import asyncio

import pytest
from aiohttp import web

from pdserve.bench.load.session import get_json, open_session
from pdserve.ports import free_ports
from wire.errors import Unavailable


def failure_of(status: int | None, content: str = "") -> str:
    """Return the message of the error for a server with this answer; none listens where `status` is None."""

    async def answer(request: web.Request) -> web.Response:
        assert status is not None
        return web.Response(status=status, text=content)

    async def run() -> None:
        app = web.Application()
        if status is not None:
            app.router.add_get("/v1/models", answer)
        (port,) = free_ports(1)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            if status is not None:
                await web.TCPSite(runner, "127.0.0.1", port).start()
            async with open_session({}, 20.0, {}) as http:
                await get_json(http, f"http://127.0.0.1:{port}/v1/models")
        finally:
            await runner.cleanup()

    with pytest.raises(Unavailable) as reported:
        asyncio.run(run())
    return str(reported.value)


def test_a_missing_server_is_reported_with_a_reason() -> None:
    reported = failure_of(None)

    assert "/v1/models does not answer: no connection: Connection refused" in reported
    assert "ssl" not in reported


def test_a_refused_key_names_the_sources_of_keys() -> None:
    reported = failure_of(401, '{"error": {"message": "this server requires a key"}}')

    assert "HTTP 401: this server requires a key" in reported
    assert reported.endswith("; a key is read from $PDSERVE_API_KEY, $VLLM_API_KEY or $OPENAI_API_KEY")


def test_a_foreign_server_is_reported_as_not_pdserve() -> None:
    reported = failure_of(404, "<!DOCTYPE HTML>\n<html>")

    assert reported.endswith(
        "/v1/models returned HTTP 404 with a body that is not JSON: "
        "is --base-url the URL of an OpenAI-compatible server?"
    )
