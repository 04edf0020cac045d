"""Responses without a client: generated, polled, followed, cancelled and ended once, by the official client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scheduler.responses_store.sqlite_store import SqliteStore
from tests.scheduler.storing_server import DEADLINE_S, StoringServer, storing
from tests.scheduler.test_responses import checked
from tests.scheduler.vision_model import PNG, data_url, write_vision_model
from wire.errors import HandoffFailed, Overloaded, PdserveError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

TEXT = "hello world good morning"
BODY: Any = {"input": "hi", "background": True}


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """Return the response when it is no longer running."""
    async with asyncio.timeout(DEADLINE_S):
        while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    checked(response.to_dict())
    return response


async def held(server: StoringServer, client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """Return a response that waits after its first token."""
    server.dispatcher.hold_after = 1
    created = await client.responses.create(**BODY | fields)
    await asyncio.wait_for(server.dispatcher.held.wait(), DEADLINE_S)
    return created


@pytest.mark.covers("B.responses.14")
async def test_a_background_response_is_polled_to_its_end(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        whole = await client.responses.create(input="hi")
        created = await held(server, client, metadata={"a": "b"})
        running = await client.responses.retrieve(created.id)
        assert server.context.drain.active == 1
        with pytest.raises(openai.BadRequestError, match="has not ended: wait for it") as early:
            await client.responses.create(input="hi", previous_response_id=created.id)
        server.dispatcher.released.set()
        done = await ended(client, created.id)
        listed = await client.responses.input_items.list(created.id)
        again = await client.responses.create(input="more", previous_response_id=created.id)

    assert (created.status, running.status, done.status) == ("queued", "in_progress", "completed")
    assert (created.background, created.output, running.output) == (True, [], [])
    assert (done.output_text, done.usage) == (TEXT, whole.usage)
    assert created.to_dict() == running.to_dict() | {"status": "queued"}
    assert early.value.param == "previous_response_id"
    assert [item.type for item in listed.data] == ["message"]
    assert again.status == "completed"


@pytest.mark.parametrize(
    ("error", "code"),
    [(HandoffFailed("the KV did not arrive"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")],
)
@pytest.mark.parametrize("early", [False, True])
async def test_a_background_response_that_fails_says_why(
    serve: Any, tmp_path: Path, error: PdserveError, code: str, early: bool
) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        server.dispatcher.fail_after, server.dispatcher.error = (0 if early else 1), error

        done = await ended(client, (await client.responses.create(**BODY)).id)

        assert server.dispatcher.outcomes == ["failed"]
    assert (done.status, done.error.code, done.error.message) == ("failed", code, str(error))
    assert done.output_text == ("" if early else "hello")


@pytest.mark.covers("B.responses.14")
async def test_cancel_ends_a_background_response_once(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        created = await held(server, client)

        cancelled = await client.responses.cancel(created.id)

        assert server.dispatcher.outcomes == ["cancelled"]
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "hello")
        again, kept = await client.responses.cancel(created.id), await client.responses.retrieve(created.id)
        assert again.to_dict() == kept.to_dict() == cancelled.to_dict()
        assert server.context.drain.active == 0


async def test_cancel_leaves_what_has_ended_as_it_is(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        done = await ended(client, (await client.responses.create(**BODY)).id)
        with_client = await client.responses.create(input="hi")

        cancelled = await client.responses.cancel(done.id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(with_client.id)

    assert cancelled.to_dict() == done.to_dict()
    assert done.status == "completed"


async def test_a_deleted_background_response_is_cancelled(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        created = await held(server, client)

        await client.responses.delete(created.id)

        assert server.dispatcher.outcomes == ["cancelled"]
        assert await server.stored_ids() == []


@pytest.mark.parametrize(
    ("stores", "fields", "text"),
    [
        (True, {"store": False}, "background can only be used when `store` is true"),
        (False, {}, r"when `store` is true: this server stores no responses \(--responses-store\)"),
    ],
)
async def test_background_needs_a_stored_response(
    serve: Any, tmp_path: Path, stores: bool, fields: Any, text: str
) -> None:  # fmt: skip
    async with storing(serve, tmp_path, stores=stores) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match=text) as refused:
            await client.responses.create(**BODY | fields)

        assert refused.value.param == "background"
        assert server.dispatcher.requests == []


async def test_a_full_queue_refuses_before_anything_is_stored(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.refuse_with = Overloaded("full")

        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**BODY)

        assert await server.stored_ids() == []


@pytest.mark.covers("B.responses.15")
async def test_a_background_stream_is_followed_from_any_event(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        stream = await client.responses.create(**BODY, stream=True)
        seen = [event async for event in stream]
        response_id = seen[0].response.id
        server.dispatcher.hold_after = 1
        stream = await client.responses.create(**BODY, stream=True)
        first = [await anext(aiter(stream)) for _ in range(3)]
        running_id = first[0].response.id
        await stream.close()  # the response goes on
        resumed = asyncio.create_task(_events_after(server, running_id, 1))
        late = asyncio.create_task(_events_after(server, running_id, -1))
        await asyncio.sleep(0)
        server.dispatcher.released.set()
        rest, everything = await resumed, await late
        done = await ended(client, running_id)
        again = {after: await _events_after(server, response_id, after) for after in (-1, 3, len(seen) - 1, 1000)}

    assert [event.to_dict() for event in seen] == again[-1]
    assert (again[3], again[len(seen) - 1], again[1000]) == (again[-1][4:], [], [])
    assert [event["type"] for event in everything] == [event["type"] for event in again[-1]]
    assert everything[:3] == [event.to_dict() for event in first]
    assert rest == everything[2:]
    assert rest[-1]["response"] == done.to_dict()


async def test_the_last_event_says_that_the_response_is_stored(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        for _ in range(3):
            stream = await client.responses.create(**BODY, stream=True)
            async for event in stream:
                if event.type == "response.completed":
                    await client.responses.create(input="more", previous_response_id=event.response.id)
                    break
            else:
                pytest.fail("no last event")


async def test_the_last_event_says_if_the_response_is_not_stored(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT) as server, server.client() as client:
        server.dispatcher.hold_after = 1
        stream = await client.responses.create(**BODY, stream=True)
        await anext(aiter(stream))
        await server.write_protect(True)
        server.dispatcher.released.set()

        last: Any = [event async for event in stream][-1]

    assert (last.type, last.response.to_dict()["store"]) == ("response.completed", False)


async def _events_after(server: StoringServer, response_id: str, after: int) -> list[Any]:
    query: Any = {"stream": "true"} | ({} if after < 0 else {"starting_after": after})
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        answer = await http.get(f"{server.url}/v1/responses/{response_id}", params=query)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.partition("\ndata: ")[2]) for part in answer.text.split("\n\n")[:-1]]


@pytest.mark.parametrize(
    ("fields", "query", "param", "text"),
    [
        ({}, {"stream": True}, "stream", "only the events of a response that was created with background and stream"),
        ({"stream": True}, {"stream": True}, "stream", "only the events"),
        ({"background": True}, {"stream": True}, "stream", "only the events"),
        ({}, {"starting_after": 1}, "starting_after", "starting_after needs stream=true"),
        ({}, {"stream": "maybe"}, "stream", "stream is 'maybe', but must be true or false"),
        ({}, {"stream": True, "starting_after": "x"}, "starting_after", "starting_after is 'x'"),
    ],
)
async def test_other_responses_have_no_events_to_follow(
    serve: Any, tmp_path: Path, fields: Any, query: Any, param: str, text: str
) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        await client.responses.create(input="hi", **fields)
        await server.context.drain.wait_idle(DEADLINE_S)
        (response_id,) = await server.stored_ids()

        with pytest.raises(openai.BadRequestError, match=text) as refused:
            await client.get(f"/responses/{response_id}", cast_to=object, options={"params": query})

    assert refused.value.param == param


async def test_events_beyond_the_limit_end_the_response(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT, max_answer_bytes=100) as server, server.client() as client:
        stream = await client.responses.create(**BODY, stream=True)
        last: Any = [event async for event in stream][-1]
        polled = await ended(client, (await client.responses.create(**BODY)).id)

    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "--max-answer-bytes" in last.response.error.message
    assert polled.status == "completed"


async def test_a_quiet_background_stream_has_comments(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, TEXT, sse_keep_alive_interval=0.01) as server, server.client() as client:
        server.dispatcher.hold_after = 0
        url, body = f"{server.url}/v1/responses", BODY | {"stream": True}
        async with httpx.AsyncClient(trust_env=False) as http, http.stream("POST", url, json=body) as answer:
            lines = answer.aiter_lines()
            while await anext(lines) != ": keep-alive":
                pass
            (response_id,) = await server.stored_ids()
            quiet = await client.responses.retrieve(response_id)
            server.dispatcher.released.set()
            rest = [line async for line in lines]

        kept = await _events_after(server, response_id, -1)
        done = await client.responses.retrieve(response_id)
    assert rest
    assert quiet.status == "queued"
    assert kept[-1]["response"] == done.to_dict()


async def _stops(server: StoringServer, created: Any) -> None:
    server.stop.set()
    await asyncio.sleep(0.01)
    server.dispatcher.released.set()


async def _stops_in_vain(server: StoringServer, created: Any) -> None:
    server.stop.set()
    await asyncio.wait_for(server.task, DEADLINE_S)
    await server.context.background.close()


@pytest.mark.parametrize(
    ("stops_in_s", "stops", "status"),
    [(DEADLINE_S, _stops, "completed"), (0.01, _stops_in_vain, "failed")],
)
async def test_a_server_that_stops_ends_background_responses(
    serve: Any, tmp_path: Path, stops_in_s: float, stops: Callable[[StoringServer, Any], Awaitable[None]], status: str
) -> None:
    async with storing(serve, tmp_path, TEXT, stops_in_s=stops_in_s) as server:
        async with server.client() as client:
            created = await held(server, client)
        await stops(server, created)

    store = await SqliteStore.open(tmp_path / "store", server.limits)
    kept = await store.find(created.id, "")
    await store.close()
    assert kept is not None
    assert kept.done
    assert f'"status":"{status}"'.encode() in kept.response


async def test_a_server_that_is_stopping_accepts_none(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.context.drain.begin()

        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            await client.responses.create(**BODY)

        assert await server.stored_ids() == []


async def test_an_end_that_cannot_be_stored_is_a_failure(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        created = await held(server, client)
        await server.write_protect(True)
        server.dispatcher.released.set()
        with pytest.raises(openai.InternalServerError, match="attempt to write a readonly database"):
            await ended(client, created.id)
        await server.write_protect(False)

        done = await ended(client, created.id)

    assert (done.status, done.error.message) == (
        "failed",
        "the end of this response could not be stored: send the request again",
    )


async def test_images_of_a_background_response_are_held_to_its_end(serve: Any, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "vision")
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url()}]}]
    async with storing(partial(serve, folder=folder), tmp_path, TEXT) as server, server.client() as client:
        assert server.context.images is not None
        budget = server.context.images.budget
        created = await held(server, client, input=given)
        await client.responses.retrieve(created.id)
        during = budget.num_bytes
        server.dispatcher.released.set()
        await ended(client, created.id)

    assert during >= len(PNG)
    assert budget.num_bytes == 0
