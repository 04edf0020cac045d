"""Images in chats over vLLM workers: one data URL for both legs in each order, and the worker's count of the prompt."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.limits import ControlLimits
from scheduler.workers import prefill_legs, session
from scheduler.workers.chat_body import WorkerChatBody
from scheduler.workers.http import WorkerHttp
from testing.vllm_worker.conversation import PLACEHOLDER, TOKENS_OF_IMAGE
from testing.vllm_worker.faults import Fault
from testing.vllm_worker.settings import Connector
from testing.vllm_worker.worker import Received
from tests.images.image_files import file_of, image_of
from tests.remote_files.raw_server import in_turn, ok, raw_server
from tests.scheduler.fake_cluster import FakeCluster, collect, request
from tests.scheduler.test_worker_fields import CHAT, served
from tests.scheduler.test_worker_http import OK, scripted
from tests.scheduler.virtual_time import virtual
from tests.scheduler.vision_model import PNG, chat, data_url, embeds_part, image_part, write_vision_model
from tests.scheduler.worker_cluster import WorkerCluster, leg_id, with_fake
from wire.errors import InvalidRequest
from wire.types import WorkerChat

HERE: dict[str, Any] = {"allow_private_urls": ("127.0.0.1/32",)}
NO_PROBES = ControlLimits(probe_after_s=3600.0)  # a probe would take the fault
ORDERS: list[tuple[str, Connector]] = [
    ("PD", "nixl"), ("PD", "ascend-layerwise"), ("PD", "nixl-push"), ("PD", "mooncake"), ("C", "nixl"),
]  # fmt: skip
OTHER = file_of(image_of(8, 8, seed=1), "JPEG")
GREEDY = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a vision model that instances of ours can serve too: it counts four tokens an image."""
    return write_vision_model(tmp_path_factory.mktemp("vision"))


@asynccontextmanager
async def over(
    model: Path, roles: str = "PD", connector: Connector = "nixl", **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, WorkerCluster]]:  # fmt: skip
    """The HTTP API over workers that take images."""
    fake = with_fake(vocab_size=400, max_model_len=512, takes_images=True, step_seconds=0.002)
    settings = dataclasses.replace(fake, connector=connector)
    async with served(model, roles, NO_PROBES, settings, **options) as opened:
        yield opened


def urls_in(one: Received) -> list[str]:
    """Return the URLs of the images of a request."""
    contents = [message["content"] for message in one.body["messages"] if isinstance(message["content"], list)]
    return [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]


def legs_of(cluster: WorkerCluster) -> list[Received]:
    """Return the conversations that workers got."""
    return [one for worker in cluster.workers for one in worker.received if "messages" in one.body]


async def alone(cluster: WorkerCluster, one: Received) -> dict[str, Any]:
    """Return the answer of the last worker by itself to the conversation of a request."""
    body = {
        key: value for key, value in one.body.items() if key not in ("kv_transfer_params", "stream", "stream_options")
    }
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{cluster.workers[-1].url}{CHAT}", json=body, timeout=60.0)
    assert response.status_code == 200, response.text
    cluster.workers[-1].received.pop()
    return dict(response.json())


@pytest.mark.parametrize(("roles", "connector"), ORDERS)
@pytest.mark.anyio
async def test_an_image_reaches_both_legs_in_every_order(roles: str, connector: Connector, folder: Path) -> None:
    async with over(folder, roles, connector) as (client, cluster):
        body = GREEDY | {"messages": chat("ab", image_part(data_url(), detail="low"), image_part(data_url(OTHER)), "c")}
        answers = [(await client.post(CHAT, json=body)).json() for _ in range(2)]  # the first shows a push its engine

        legs = legs_of(cluster)
        content = [
            {"type": "text", "text": "ab"}, image_part(data_url(), detail="low"),
            image_part(data_url(OTHER, "image/jpeg")), {"type": "text", "text": "c"},
        ]  # fmt: skip
        assert len(legs) == 2 * len(roles)
        assert len({leg_id(one) for one in legs}) == 2
        assert [one.body["messages"] for one in legs] == [[{"role": "user", "content": content}]] * len(legs)
        expected = await alone(cluster, legs[-1])
        for answer in answers:
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
            assert answer["prompt_token_ids"].count(PLACEHOLDER) == 2 * TOKENS_OF_IMAGE
            assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.anyio
async def test_equal_texts_with_other_images_have_other_answers(folder: Path) -> None:
    async with over(folder) as (client, _):
        bodies = [GREEDY | {"messages": chat("ab", image_part(url))} for url in (data_url(), data_url(OTHER))]
        first, other = [(await client.post(CHAT, json=body)).json() for body in bodies]

        assert first["prompt_token_ids"] == other["prompt_token_ids"]
        assert first["choices"][0]["token_ids"] != other["choices"][0]["token_ids"]


FORMS: dict[str, tuple[str, Callable[[str], dict[str, Any]], str]] = {
    "chat": (CHAT, lambda url: {"messages": chat("ab", image_part(url), "c"), "max_tokens": 8}, "prompt_tokens"),
    "messages": (
        "/v1/messages",
        lambda url: {
            "messages": chat("ab", {"type": "image", "source": {"type": "url", "url": url}}, "c"), "max_tokens": 8,
        },
        "input_tokens",
    ),
    "responses": (
        "/v1/responses",
        lambda url: {
            "input": [{"role": "user", "content": [
                {"type": "input_text", "text": "ab"}, {"type": "input_image", "image_url": url},
                {"type": "input_text", "text": "c"},
            ]}],
            "max_output_tokens": 8,
        },
        "input_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wanted", [19, 20])
@pytest.mark.anyio
async def test_a_chosen_token_takes_the_place_of_the_20th_alone(wanted: int, folder: Path) -> None:
    """vLLM counts it among the likeliest of a chat, at most 20 by default: up to 19 one more is requested."""
    body = GREEDY | {"temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": wanted}
    async with over(folder) as (client, _):
        answer = (await client.post(CHAT, json=body | {"messages": chat(image_part(data_url()))})).json()

    tokens = answer["choices"][0]["logprobs"]["content"]
    likeliest = [-(rank + 1) for rank in range(wanted)]  # of the fake model
    assert any(one["logprob"] < likeliest[-1] for one in tokens)
    for one in tokens:
        last = min(likeliest[-1], one["logprob"]) if wanted == 20 else likeliest[-1]
        assert [top["logprob"] for top in one["top_logprobs"]] == [*likeliest[:-1], last]


@pytest.mark.parametrize(("path", "body_of", "counted"), FORMS.values(), ids=FORMS)
@pytest.mark.anyio
async def test_a_url_is_fetched_once_and_no_worker_sees_it(
    path: str, body_of: Callable[[str], dict[str, Any]], counted: str, folder: Path
) -> None:
    async with raw_server(in_turn(ok(PNG))) as server, over(folder, **HERE) as (client, cluster):
        body = body_of(server.url("/a.png")) | {"temperature": 0}
        response = await client.post(path, json=body)

        assert response.status_code == 200, response.text
        legs = legs_of(cluster)
        assert [urls_in(one) for one in legs] == [[data_url()]] * 2
        assert len(server.requests) == 1
        assert response.json()["usage"][counted] == (await alone(cluster, legs[-1]))["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.anyio
async def test_a_model_of_an_unknown_family_is_counted_by_its_workers(stream: bool, model_folder: Path) -> None:
    body = GREEDY | {"messages": chat("ab", image_part(data_url())), "stream": stream}
    async with over(model_folder) as (client, cluster):
        response = await client.post(CHAT, json=body | ({"stream_options": {"include_usage": True}} if stream else {}))

        assert response.status_code == 200, response.text
        expected = await alone(cluster, cluster.workers[1].received[0])
        assert f'"prompt_tokens":{expected["usage"]["prompt_tokens"]},' in response.text
        assert f'"prompt_token_ids":{expected["prompt_token_ids"]}'.replace(" ", "") in response.text


RETRIES: list[tuple[str, Connector, Fault]] = [
    *(
        ("PPDD", connector, fault)
        for connector in ("nixl", "ascend-layerwise", "nixl-push", "mooncake")
        for fault in (Fault("error", "before", "prefill"), Fault("cut", "during", "decode", after_tokens=3))
    ),
    ("CC", "nixl", Fault("cut", "during", "local", after_tokens=3)),
]  # fmt: skip


@pytest.mark.parametrize(("roles", "connector", "fault"), RETRIES, ids=[f"{one[1]} {one[2].leg}" for one in RETRIES])
@pytest.mark.anyio
async def test_a_retry_sends_the_same_data_url(roles: str, connector: Connector, fault: Fault, folder: Path) -> None:
    async with (
        raw_server(in_turn(*[ok(PNG)] * 9)) as server,
        over(folder, roles, connector, **HERE) as (client, cluster),
    ):
        body, answers = GREEDY | {"messages": chat("ab", image_part(server.url()), "c")}, list[dict[str, Any]]()
        while len({leg_id(one) for one in legs_of(cluster)}) == len(answers):  # no request has met the fault
            cluster.workers[2 if fault.leg == "decode" else 0].faults.add(dataclasses.replace(fault))
            answers.append((await client.post(CHAT, json=body)).json())

        legs = legs_of(cluster)
        expected = await alone(cluster, legs[-1])
        for answer in answers:
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert len({leg_id(one) for one in legs}) == len(answers) + 1
        assert [urls_in(one) for one in legs] == [[data_url()]] * len(legs)
        assert len(server.requests) == len(answers)


@pytest.mark.often("two")
@pytest.mark.parametrize(
    ("roles", "n", "prefill_s", "decode_s"),
    [("PDD", 1, 0.0, 3.0), ("PDD", 2, 0.0, 3.0), ("PDD", 2, 1.0, 1.8), ("PD", 1, 0.0, 3.0)],
    ids=["one sequence", "two", "two, the first held for longer", "on the only decode worker"],
)
@pytest.mark.anyio
async def test_images_that_outlast_the_lease_give_no_wrong_answer(
    roles: str, n: int, prefill_s: float, decode_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_legs, "LEASE_S", 2.0)
    monkeypatch.setattr(session, "_POLL_S", 0.1)
    body = GREEDY | {"messages": chat("ab", image_part(data_url())), "n": n, "temperature": 1, "seed": 1}
    async with over(folder, roles) as (client, cluster):
        start, slow = cluster.workers[:2]
        expected = (await client.post(CHAT, json=body)).json()["choices"]
        start.settings = dataclasses.replace(
            start.settings, lease_s=2.5, image_seconds=prefill_s, wrong_200=True
        )  # fmt: skip
        slow.settings = dataclasses.replace(slow.settings, image_seconds=decode_s)
        slow.received.clear()
        while not slow.received:
            response = await client.post(CHAT, json=body)
            if roles == "PDD":
                assert [one["token_ids"] for one in response.json()["choices"]] == [
                    one["token_ids"] for one in expected
                ]

        assert roles == "PDD" or response.status_code == 500, response.text
        assert start.ranks[0].counts.reads_after_expiry == 0


@pytest.mark.anyio
async def test_the_history_of_a_chat_reaches_workers_in_openais_form(folder: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": f'{{"n": {2**70}}}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12"}]},
    ]
    async with over(folder) as (client, cluster):
        body = GREEDY | {"messages": [*chat("a", image_part(data_url())), *history]}
        response = await client.post(CHAT, json=body)

        assert response.status_code == 200, response.text
        made = [call], "12"
        for leg in legs_of(cluster):
            _, assistant, tool = leg.body["messages"]
            assert (assistant["tool_calls"], tool["content"]) == made
            assert assistant["content"] is None


WEATHER = {"name": "weather", "arguments": "{}"}
_FREE = {"type": "function", "function": WEATHER}
NAMELESS: dict[str, tuple[dict[str, Any], list[str | None], list[str | None]]] = {
    "the legacy form": ({"function_call": WEATHER}, [None], [None]),
    "in order": ({"tool_calls": [_FREE, _FREE]}, [None, None], [None, None]),
    "a result with another id": ({"tool_calls": [_FREE]}, [None], ["b"]),
    "beside one with an id": ({"tool_calls": [_FREE | {"id": "a"}, _FREE]}, ["a", None], [None, "a"]),
}


@pytest.mark.parametrize(("calls", "ids", "results"), NAMELESS.values(), ids=NAMELESS)
@pytest.mark.anyio
async def test_a_call_without_an_id_gets_that_of_its_result(
    calls: dict[str, Any], ids: list[str | None], results: list[str | None], folder: Path
) -> None:
    answers = [{"role": "tool", "content": "1"} | ({"tool_call_id": one} if one else {}) for one in results]
    history = [{"role": "assistant", "content": None} | calls, *answers]
    async with over(folder) as (client, cluster):
        response = await client.post(CHAT, json=GREEDY | {"messages": [*chat("a", image_part(data_url())), *history]})

        assert response.status_code == 200, response.text
        prefill, decode = legs_of(cluster)
        assert prefill.body["messages"] == decode.body["messages"]
        _, assistant, *tools = decode.body["messages"]
        made = [call["id"] for call in assistant["tool_calls"]]
        assert len(set(made)) == len(made)
        assert [own if given is None else given for own, given in zip(made, ids, strict=True)] == made
        named = [one["tool_call_id"] for one in tools]
        assert named == (made if results != [None, "a"] else made[::-1])


@pytest.mark.anyio
async def test_a_file_reaches_workers_as_a_data_url(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    body = GREEDY | {"messages": chat(image_part(f"file://{tmp_path}/a.png"))}
    async with over(folder, allowed_local_media_path=str(tmp_path)) as (client, cluster):
        response = await client.post(CHAT, json=body)

        assert response.status_code == 200, response.text
        assert [urls_in(one) for one in legs_of(cluster)] == [[data_url()]] * 2


@pytest.mark.anyio
async def test_a_uuid_reaches_no_worker_and_names_images_of_one_key(folder: Path) -> None:
    named, again = image_part(data_url()) | {"uuid": "cat"}, {"type": "image_url", "image_url": None, "uuid": "cat"}
    async with over(folder, api_key=("one", "two")) as (client, cluster):

        async def ask(key: str, part: dict[str, Any]) -> httpx.Response:
            body = GREEDY | {"messages": chat("a", part)}
            return await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})

        assert [(await ask("one", part)).status_code for part in (named, again)] == [200, 200]
        other = await ask("two", again)

        legs = legs_of(cluster)
        assert [urls_in(one) for one in legs] == [[data_url()]] * 4
        assert not any("uuid" in part for one in legs for part in one.body["messages"][0]["content"])
        assert (other.status_code, other.json()["error"]["param"]) == (400, "messages.0.content.1")


@pytest.mark.anyio
async def test_an_image_whose_workers_leave_is_not_dropped(model_folder: Path) -> None:
    had_workers = iter([True])
    async with over(model_folder, has_workers=lambda: next(had_workers, False)) as (client, cluster):
        response = await client.post(CHAT, json=GREEDY | {"messages": chat("a", image_part(data_url()))})

        assert response.status_code == 503, response.text
        assert not any(worker.received for worker in cluster.workers)


EMBEDS = {"messages": chat("a", embeds_part())}
BESIDE_TEXT = {"prompt": "a<image>", "multi_modal_data": {"image": [data_url()]}}
REFUSED: dict[str, tuple[bool, str, dict[str, Any], str, str]] = {
    "a private address": (
        True, CHAT, {"messages": chat("a", image_part("http://127.0.0.1:9/a.png"))}, "127.0.0.1",
        "messages.0.content.1",
    ),
    "no image": (True, CHAT, {"messages": chat(image_part(data_url(b"text")))}, "PNG", "messages.0.content.0"),
    "too many": (True, CHAT, {"messages": chat(*[image_part(data_url())] * 3)}, "limit is 2", "messages.0.content.2"),
    "embeddings": (True, CHAT, EMBEDS, "image_embeds, and images with a text", "messages"),
    "embeddings of an unknown family": (False, CHAT, EMBEDS, "which unpickle them", "messages.0.content.1"),
    "beside a text prompt": (True, "/v1/completions", BESIDE_TEXT, "images with a text prompt, are not", "messages"),
    "an unknown family beside a text prompt": (
        False, "/v1/completions", BESIDE_TEXT, "know how many tokens an image has", "multi_modal_data.image.0",
    ),
    "counting an unknown family": (
        False, "/tokenize", {"messages": chat(image_part(data_url()))}, "know how many tokens an image has",
        "messages.0.content.0",
    ),
    "cutting the prompt": (
        True, CHAT, {"messages": chat("a" * 300, image_part(data_url())), "truncate_prompt_tokens": 9},
        "cannot be truncated", "truncate_prompt_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("is_known", "path", "body", "message", "param"), REFUSED.values(), ids=REFUSED)
@pytest.mark.anyio
async def test_what_is_refused_reaches_no_worker(
    is_known: bool, path: str, body: dict[str, Any], message: str, param: str, folder: Path, model_folder: Path
) -> None:
    options: dict[str, Any] = {"limit_mm_per_prompt": 2, "enable_mm_embeds": True}
    async with over(folder if is_known else model_folder, **options) as (client, cluster):
        response = await client.post(path, json=body)

        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == param
        assert not any(worker.received for worker in cluster.workers)


@pytest.mark.parametrize("roles", ["PD", "C"])
@pytest.mark.anyio
async def test_what_a_worker_refuses_is_the_clients_error(roles: str, folder: Path) -> None:
    room_for_one: dict[str, Any] = {"max_image_bytes": len(PNG) + 9}
    async with served(folder, roles, None, with_fake(vocab_size=400), **room_for_one) as (client, _):
        for _ in range(2):
            response = await client.post(CHAT, json=GREEDY | {"messages": chat("a", image_part(data_url()))})

            assert response.status_code == 400, response.text
            assert "is not a multimodal model" in response.json()["error"]["message"]
        assert (await client.post(CHAT, json=GREEDY | {"messages": chat("a")})).status_code == 200


@pytest.mark.anyio
async def test_a_prompt_too_long_by_its_images_is_the_clients_error(model_folder: Path) -> None:
    async with over(model_folder, limit_mm_per_prompt=32) as (client, cluster):
        parts = [image_part(data_url())] * 30
        response = await client.post(CHAT, json=GREEDY | {"messages": chat(*parts)})

        assert response.status_code == 400, response.text
        assert "maximum context length" in response.json()["error"]["message"]
        assert not cluster.workers[1].received


@virtual
async def test_an_instance_of_ours_never_answers_without_the_image() -> None:
    async with FakeCluster("PD").serving() as cluster:
        chat_only = dataclasses.replace(
            request((5, 6, 7)), chat=WorkerChat((b'"messages":[', b"]"), (("image/png", PNG),))
        )
        with pytest.raises(InvalidRequest, match="an image, but decode-0 takes text only"):
            await collect(cluster.control.dispatch, chat_only)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 * 2**17, 2**20 + 1])
@pytest.mark.anyio
async def test_a_body_is_sent_in_pieces_as_long_as_it_says(size: int) -> None:
    chat = WorkerChat((b'"messages":["', b'","', b'"]'), (("image/png", bytes(size)), ("image/gif", b"ab")))
    body = WorkerChatBody(b'{"model":"m"}', chat)
    urls = [data_url(bytes(size)), data_url(b"ab", "image/gif")]
    async with scripted(OK) as (script, http):
        await http.post_json(CHAT, body, {})

        sent = script.requests[0].partition(b"\r\n\r\n")[2]
        assert len(sent) == len(body)
        assert json.loads(sent) == {"model": "m", "messages": urls}


@pytest.mark.anyio
async def test_an_answer_before_the_whole_body_ends_its_connection() -> None:
    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        ended.set()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        http = WorkerHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        body = WorkerChatBody(b'{"model":"m"}', WorkerChat((b'"messages":["', b'"]'), (("image/png", bytes(2**24)),)))
        with pytest.raises(InvalidRequest, match=r"^no$"):
            await asyncio.wait_for(http.post_json(CHAT, body, {}), 30.0)
        assert not http._idle
        await asyncio.wait_for(ended.wait(), 30.0)
