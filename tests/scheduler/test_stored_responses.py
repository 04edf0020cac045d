"""Stored responses, by the official client: retrieved, continued, listed, deleted, and hidden from others."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from scheduler.api.responses.input_items import read_conversation, read_items
from scheduler.api.responses.stored_items import page_of, stored_items
from scheduler.http.keys import Keys
from scheduler.responses_store.sqlite_rows import LOST
from tests.scheduler.storing_server import DEADLINE_S, LIMITS, storing
from tests.scheduler.test_responses import TOOLS
from tests.scheduler.test_tool_calls import CALLED
from tests.scheduler.vision_model import data_url
from wire.errors import HandoffFailed, InvalidRequest, Overloaded, Unavailable

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
FOREIGN = "resp_" + "0" * 40
GONE = "it was deleted, has expired, or never existed"
NO_STORE = "this server stores no responses"
ELSEWHERE = "another scheduler stores it, or its store is gone"


@pytest.mark.covers("B.responses.10")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [None, 3])
async def test_a_stored_response_is_what_the_client_got(
    serve: Any, tmp_path: Path, stream: bool, limit: int | None
) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        body: Any = {"model": server.model, "input": "hi", "max_output_tokens": limit, "metadata": {"a": "b"}}
        if stream:
            events = [event async for event in await client.responses.create(**body, stream=True)]
            got = events[-1].response
        else:
            got = await client.responses.create(**body)

        kept = await client.responses.retrieve(got.id)

    assert kept.to_dict() == got.to_dict()
    assert (got.status, got.to_dict()["store"]) == ("completed" if limit is None else "incomplete", True)


@pytest.mark.parametrize(
    ("stores", "fields", "why"),
    [(True, {"store": False}, GONE), (False, {}, NO_STORE), (False, {"store": True}, NO_STORE)],
)
async def test_what_is_not_stored_says_so(serve: Any, tmp_path: Path, stores: bool, fields: Any, why: str) -> None:
    async with storing(serve, tmp_path, stores=stores) as server, server.client() as client:
        got = await client.responses.create(model=server.model, input="hi", **fields)

        for use in ROUTES.values():
            with pytest.raises(openai.NotFoundError, match=f"Response with id .* not found.*{why}"):
                await use(client, got.id)
        assert got.to_dict()["store"] is False
        assert await server.stored_ids() == []


async def test_a_failed_stream_is_stored_with_its_error(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.fail_after, server.dispatcher.error = 3, HandoffFailed("the KV did not arrive")
        stream = await client.responses.create(model=server.model, input="hi", stream=True)
        last: Any = [event async for event in stream][-1]

        kept = await client.responses.retrieve(last.response.id)

    assert last.type == "response.failed"
    assert kept.to_dict() == last.response.to_dict()
    assert (kept.status, kept.error and kept.error.message) == ("failed", "the KV did not arrive")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("no path")])
async def test_a_refused_request_stores_nothing(serve: Any, tmp_path: Path, stream: bool, error: Any) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.refuse_with = error

        with pytest.raises(openai.APIStatusError):
            await client.responses.create(model=server.model, input="hi", stream=stream)

        assert await server.stored_ids() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_has_cancelled_its_response(serve: Any, tmp_path: Path, stream: bool) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.hold_after = 1
        body: Any = {"model": server.model, "input": "hi", "stream": stream}
        creating = asyncio.create_task(client.responses.create(**body))
        await asyncio.wait_for(server.dispatcher.held.wait(), DEADLINE_S)
        (response_id,) = await server.stored_ids()
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        if stream:
            await (await creating).close()
        else:
            creating.cancel()
        await asyncio.wait_for(server.dispatcher.closed.wait(), DEADLINE_S)
        assert await server.context.drain.wait_idle(DEADLINE_S)

        kept = await client.responses.retrieve(response_id)

        assert server.dispatcher.outcomes == ["cancelled"]
    assert (kept.status, kept.output_text) == ("cancelled", "hello" if stream else "")


@pytest.mark.covers("B.responses.11")
async def test_a_response_continues_those_before_it(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        create, model = client.responses.create, server.model
        first = await create(model=model, input="one", instructions="Be brief.")
        second = await create(model=model, input="two", previous_response_id=first.id)
        third = await create(
            model=model, input=[{"role": "user", "content": "three"}], previous_response_id=second.id, instructions="Go"
        )
        says: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "hello world"}]
        says += [{"role": "user", "content": "two"}, {"role": "assistant", "content": "hello world"}]
        await create(model=model, input=[*says[:2], {"role": "user", "content": "two"}])
        await create(model=model, input=[*says, {"role": "user", "content": "three"}], instructions="Go")
        branch = await create(model=model, input="other", previous_response_id=first.id)
        counted = await client.responses.input_tokens.count(model=model, input="two", previous_response_id=first.id)

        prompts = [request.prompts for request in server.dispatcher.requests]
        assert prompts[1:3] == prompts[3:5]
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(prompts[1][0]))
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        await client.responses.delete(first.id)
        assert (await create(model=model, input="more", previous_response_id=branch.id)).status == "completed"
        with pytest.raises(openai.NotFoundError, match=GONE) as missing:
            await create(model=model, input="more", previous_response_id=first.id)
    assert missing.value.param == "previous_response_id"


@pytest.mark.covers("B.responses.11")
async def test_a_call_is_answered_by_its_result_alone(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path, CALLED, tool_call_parser="hermes") as server:
        async with server.client() as client:
            tools: Any = TOOLS
            called = await client.responses.create(model=server.model, input="hi", **tools)
            (call,) = called.output
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
            await client.responses.create(model=server.model, input=[result], previous_response_id=called.id, **tools)
            await client.responses.create(
                model=server.model, input=[{"role": "user", "content": "hi"}, call.to_dict(), result], **tools
            )
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(
                    model=server.model, input=[result | {"call_id": "other"}], previous_response_id=called.id, **tools
                )

        _, continued, given = server.dispatcher.requests
        assert continued.prompts == given.prompts
    assert refused.value.param == "input.0.call_id"


async def test_an_answer_is_continued_with_its_thinking(serve: Any, tmp_path: Path) -> None:
    options: Any = {"reasoning_parser": "deepseek_r1", "chat_template": "{{ messages|tojson }}"}
    async with storing(serve, tmp_path, "hm</think>hello", **options) as server, server.client() as client:
        first = await client.responses.create(model=server.model, input="hi")
        await client.responses.create(model=server.model, input="more", previous_response_id=first.id)
        given: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
        await client.responses.create(model=server.model, input=[*given, {"role": "user", "content": "more"}])

        _, continued, sent = server.dispatcher.requests
        assert continued.prompts == sent.prompts
    assert [item.type for item in first.output] == ["reasoning", "message"]


async def test_a_running_response_may_be_deleted(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.hold_after = 1
        creating = asyncio.create_task(client.responses.create(model=server.model, input="hi"))
        await asyncio.wait_for(server.dispatcher.held.wait(), DEADLINE_S)
        (response_id,) = await server.stored_ids()

        await client.responses.delete(response_id)

        server.dispatcher.released.set()
        got = await creating
        assert await server.stored_ids() == []
    assert (got.status, got.to_dict()["store"]) == ("completed", False)


@pytest.mark.covers("B.responses.12")
async def test_input_items_are_listed_page_by_page(serve: Any, tmp_path: Path) -> None:
    given: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_own", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "calls"},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    async with storing(serve, tmp_path) as server, server.client() as client:
        first = await client.responses.create(model=server.model, input=given)
        second = await client.responses.create(model=server.model, input="two", previous_response_id=first.id)
        pages = client.responses.input_items
        newest = await pages.list(second.id, limit=1)
        ascending = [item async for item in pages.list(second.id, order="asc", limit=3)]
        descending = [item async for item in pages.list(second.id, limit=2)]
        rest = await pages.list(second.id, after=ascending[0].id, order="asc")

    shown: Any = [item.to_dict() for item in ascending]
    assert [(one["type"], one.get("role")) for one in shown] == [
        ("message", "developer"), ("message", "user"), ("reasoning", None), ("message", "assistant"),
        ("function_call", None), ("function_call_output", None), ("message", "assistant"), ("message", "user"),
    ]  # fmt: skip
    assert [type(item).__name__ for item in map(ITEM.validate_python, shown)] == [
        type(item).__name__ for item in ascending
    ]
    assert len({one["id"] for one in shown}) == len(shown)
    assert shown[2]["id"] == "rs_own"
    assert shown[6] == first.output[0].to_dict()
    assert shown[0]["content"] == [{"type": "input_text", "text": "Be brief."}]
    assert shown[3]["content"] == [{"type": "output_text", "text": "calls", "annotations": []}]
    assert [item.id for item in descending] == [item.id for item in reversed(ascending)]
    assert (newest.has_more, newest.data, rest.data) == (True, ascending[-1:], ascending[1:])


@pytest.mark.parametrize(
    ("query", "param", "text"),
    [
        ({"limit": 0}, "limit", "limit is '0', but must be a number from 1 to 100"),
        ({"limit": 101}, "limit", "must be a number from 1 to 100"),
        ({"limit": "many"}, "limit", "limit is 'many'"),
        ({"order": "up"}, "order", "order is 'up', but must be asc or desc"),
        ({"after": "msg_1"}, "after", "after is 'msg_1', which is not an item of this response"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(
    serve: Any, tmp_path: Path, query: Any, param: str, text: str
) -> None:  # fmt: skip
    async with storing(serve, tmp_path) as server, server.client() as client:
        got = await client.responses.create(model=server.model, input="hi")

        with pytest.raises(openai.BadRequestError, match=text) as refused:
            await client.responses.input_items.list(got.id, extra_query=query)
    assert refused.value.param == param


async def test_a_page_has_20_items_by_default(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        given: Any = [{"role": "user", "content": str(number)} for number in range(21)]
        stored = await client.responses.create(model=server.model, input=given)
        page = await client.responses.input_items.list(stored.id)

    assert (len(page.data), page.has_more) == (20, True)


IMAGE = {"type": "input_image", "image_url": data_url()}
TEXT, ANSWER = {"type": "input_text", "text": "a"}, {"type": "output_text", "text": "a"}


@pytest.mark.parametrize(
    ("role", "content", "stored"),
    [
        ("user", "a", [TEXT]),
        ("user", [{"type": "text", "text": "a"}, TEXT], [TEXT, TEXT]),
        ("user", [IMAGE, TEXT], [IMAGE | {"detail": "auto"}, TEXT]),
        ("user", [IMAGE | {"detail": "low"}], [IMAGE | {"detail": "low"}]),
        ("assistant", [ANSWER], [ANSWER | {"annotations": []}]),
    ],
)  # fmt: skip
def test_a_stored_message_can_be_continued(role: str, content: Any, stored: list[Any]) -> None:
    (item,) = stored_items(read_items([{"role": role, "content": content}]), "resp_1")

    ITEM.validate_python(item)
    assert item["content"] == stored
    assert len(read_conversation([item, *read_items("next")], None, num_earlier=1)) == 2


def test_a_page_after_the_last_item_is_empty() -> None:
    items = [{"id": "a"}, {"id": "b"}]

    page = page_of(items, limit=2, order="asc", after="b")

    assert page == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
    with pytest.raises(InvalidRequest):
        page_of([], limit=1, order="asc", after="a")


ROUTES: Any = {
    "retrieve": lambda client, response_id: client.responses.retrieve(response_id),
    "delete": lambda client, response_id: client.responses.delete(response_id),
    "cancel": lambda client, response_id: client.responses.cancel(response_id),
    "input_items": lambda client, response_id: client.responses.input_items.list(response_id),
    "create": lambda client, response_id: client.responses.create(input="hi", previous_response_id=response_id),
}


@pytest.mark.covers("B.responses.13")
@pytest.mark.parametrize("route", ROUTES)
async def test_only_its_owner_finds_a_response(serve: Any, tmp_path: Path, route: str) -> None:
    keys = Keys(["sk-alice", "sk-bob"])
    async with (
        storing(serve, tmp_path, keys=keys) as server,
        server.client("sk-alice") as alice,
        server.client("sk-bob") as bob,
    ):
        own = await alice.responses.create(model=server.model, input="hi")
        store = own.id[: len("resp_") + 8]
        errors = {}
        for response_id in (own.id, store + "0" * 32, FOREIGN, "resp_1", "x" * 200):
            with pytest.raises(openai.NotFoundError) as missing:
                await ROUTES[route](bob, response_id)
            errors[response_id] = str(missing.value.body["message"]).partition(": ")[2]  # type: ignore[index]
            assert missing.value.type == "not_found_error"
        kept = await alice.responses.retrieve(own.id)

    assert list(errors.values()) == [GONE, GONE, ELSEWHERE, GONE, GONE]
    assert kept.to_dict() == own.to_dict()


@pytest.mark.covers("B.responses.13")
async def test_a_deleted_response_is_gone(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        got = await client.responses.create(model=server.model, input="hi")

        deleted = await client.delete(f"/responses/{got.id}", cast_to=dict[str, Any])

        assert deleted == {"id": got.id, "object": "response", "deleted": True}
        for use in ROUTES.values():
            with pytest.raises(openai.NotFoundError, match=GONE):
                await use(client, got.id)
        assert await server.stored_ids() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_cannot_be_stored_still_reaches_the_client(
    serve: Any, tmp_path: Path, stream: bool
) -> None:  # fmt: skip
    async with storing(serve, tmp_path) as server, server.client() as client:
        server.dispatcher.hold_after = 1
        body: Any = {"model": server.model, "input": "hi", "stream": stream}
        creating = asyncio.create_task(client.responses.create(**body))
        await asyncio.wait_for(server.dispatcher.held.wait(), DEADLINE_S)
        await server.write_protect(True)
        server.dispatcher.released.set()
        got: Any = await creating
        if stream:
            got = [event async for event in got][-1].response
        await server.write_protect(False)

        kept = await client.responses.retrieve(got.id)

    assert (kept.status, kept.error and kept.error.message) == ("failed", LOST["message"])
    assert (got.status, got.output_text, got.to_dict()["store"]) == ("completed", "hello world", False)


@pytest.mark.covers("B.responses.16")
async def test_a_full_disk_refuses_only_what_is_to_be_stored(serve: Any, tmp_path: Path) -> None:
    async with storing(serve, tmp_path) as server, server.client() as client:
        connection = server.store._opened._connection
        await server.store._call(lambda: connection.execute("PRAGMA max_page_count = 1").fetchone())
        long, notes = "hi " * 150, {f"n{number}": "x" * 512 for number in range(16)}

        with pytest.raises(openai.InternalServerError, match="the store of responses failed: database or disk is full"):
            await client.responses.create(model=server.model, input=long, metadata=notes)
        unharmed = await client.responses.create(model=server.model, input=long, store=False)

        assert unharmed.status == "completed"
        assert len(server.dispatcher.requests) == 1


async def test_an_input_larger_than_the_store_is_refused(serve: Any, tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, max_bytes=1500)
    async with storing(serve, tmp_path, limits=limits) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"more than the server stores \(1500\)") as refused:
            await client.responses.create(model=server.model, input="x" * 400, metadata={"a": "x" * 500})
        await client.responses.create(model=server.model, input="hi", store=False)

    assert refused.value.param == "input"
