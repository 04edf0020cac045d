"""Images in chats of every API become tokens of the prompt, over a scripted dispatcher."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from scheduler.request import GenerationRequest
from tests.images.image_files import file_of, image_of
from tests.remote_files.raw_server import in_turn, ok, raw_server
from tests.scheduler.vision_model import (
    HIDDEN_SIZE,
    IMAGE,
    NUM_TOKENS,
    PNG,
    TEXT,
    chat,
    data_url,
    embeds_part,
    image_part,
    write_vision_model,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer", "one_header_reader")]

HERE = {"allow_private_urls": ("127.0.0.1/32",)}
OTHER = file_of(image_of(8, 8, seed=1), "JPEG")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the vision model."""
    return write_vision_model(tmp_path_factory.mktemp("vision"))


async def sent(served: Any, path: str, body: dict[str, Any]) -> GenerationRequest:
    """Send a request that is answered; return what the dispatcher got."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await served.client.post(path, json={"model": served.model, limit: 4} | body)
    assert response.status_code == 200, response.text
    return served.dispatcher.requests[-1]  # type: ignore[no-any-return]


def placed(request: GenerationRequest) -> list[tuple[int, int, bytes]]:
    """Return start, count and file of the images of a request's only prompt."""
    (images,) = request.images
    return [(image.start, image.count, image.data) for image in images]


ANTHROPIC = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": chat("ab", image_part(data_url()), "c")}),
    ("/v1/chat/completions", {"messages": chat("ab", image_part(data_url(), detail="high"), "c")}),
    ("/v1/messages", {"messages": chat("ab", {"type": "image", "source": ANTHROPIC}, "c")}),
    ("/v1/messages", {"messages": chat("ab", {"type": "image", "source": {"type": "url", "url": data_url()}}, "c")}),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "ab"}, {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_text", "text": "c"},
    ]}]}),
]  # fmt: skip


@pytest.mark.covers("B.images.1")
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_an_image_stands_between_its_texts_in_every_api(
    serve: Any, folder: Path, path: str, body: dict[str, Any]
) -> None:
    async with serve(folder=folder) as served:
        request = await sent(served, path, body)

        before, (token,), after = served.ids("ab"), served.ids(IMAGE), served.ids("c")
        assert request.prompts == ((*before, *(token,) * NUM_TOKENS, *after),)
        assert placed(request) == [(len(before), NUM_TOKENS, PNG)]


async def test_images_are_placed_in_the_order_of_their_parts(serve: Any, folder: Path) -> None:
    parts = image_part(data_url(OTHER, "image/jpeg")), image_part(data_url()), "between", image_part(data_url())
    async with serve(folder=folder) as served:
        request = await sent(served, "/v1/chat/completions", {"messages": chat(*parts)})

        later = 2 * NUM_TOKENS + len(served.ids("between"))
        assert placed(request) == [(0, 4, OTHER), (NUM_TOKENS, 4, PNG), (later, 4, PNG)]
        first, second, third = (image.digest for image in request.images[0])
        assert first != second == third


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_placeholders_of_a_text_stand_for_its_images(serve: Any, folder: Path, path: str) -> None:
    body = {"prompt": f"a{IMAGE}b{IMAGE}", "multi_modal_data": {"image": [data_url(), data_url(OTHER)]}}
    async with serve(folder=folder) as served:
        (token,) = served.ids(IMAGE)
        ids = (*served.ids("a"), *(token,) * NUM_TOKENS, *served.ids("b"), *(token,) * NUM_TOKENS)
        if path == "/tokenize":
            response = await served.client.post(path, json=body)
            assert tuple(response.json()["tokens"]) == ids
        else:
            request = await sent(served, path, body)
            assert request.prompts == (ids,)
            assert [data for _, _, data in placed(request)] == [PNG, OTHER]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "ab", "multi_modal_data": {"image": [data_url()]}}, "prompt"),
        ({"prompt": [IMAGE, IMAGE], "multi_modal_data": {"image": [data_url()]}}, "prompt"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"prompt": IMAGE, "multi_modal_data": [None, None]}, "multi_modal_data"),
        ({"prompt": IMAGE, "multi_modal_data": "image"}, "multi_modal_data"),
        ({"prompt": IMAGE, "multi_modal_data": {"video": [data_url()]}}, "multi_modal_data"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": [7]}}, "multi_modal_data.image.0"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": ["ftp://a"]}}, "multi_modal_data.image.0"),
    ],
)
async def test_other_images_of_a_text_are_refused(serve: Any, folder: Path, body: dict[str, Any], param: str) -> None:
    async with serve(folder=folder) as served:
        response = await served.client.post("/v1/completions", json={"model": served.model} | body)

        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.covers("B.images.12")
async def test_a_digest_is_shared_within_a_cache_salt_only(serve: Any, folder: Path) -> None:
    body = {"messages": chat(image_part(data_url()))}
    async with serve(folder=folder) as served:
        requests = [
            await sent(served, "/v1/chat/completions", body | salt) for salt in ({}, {}, {"cache_salt": "mine"})
        ]

        first, again, other = (request.images[0][0].digest for request in requests)
        assert first == again != other


@pytest.mark.covers("B.images.13")
@pytest.mark.parametrize("nothing", [None, {}])
async def test_a_uuid_names_an_image_again_within_its_tenant(serve: Any, folder: Path, nothing: Any) -> None:
    named, again = image_part(data_url()) | {"uuid": "cat"}, {"type": "image_url", "image_url": nothing, "uuid": "cat"}
    other = {"messages": chat(again), "cache_salt": "other"}
    async with serve(folder=folder) as served:
        first = await sent(served, "/v1/chat/completions", {"messages": chat("a", named, again)})
        second = await sent(served, "/v1/chat/completions", {"messages": chat(again, "b")})
        refused = await served.client.post("/v1/chat/completions", json={"model": served.model} | other)

        assert [data for _, _, data in (*placed(first), *placed(second))] == [PNG] * 3
        assert len({image.digest for request in (first, second) for image in request.images[0]}) == 1
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0")
        assert served.context.images.budget.num_bytes == 0


@pytest.mark.covers("B.images.14")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_embeds_stand_where_an_image_would(serve: Any, folder: Path, dtype: str) -> None:
    count, width = NUM_TOKENS - 1, {"float32": 4}.get(dtype, 2)
    data = bytes(range(width * count * HIDDEN_SIZE))
    part = embeds_part(data, dtype=dtype, shape=[count, HIDDEN_SIZE]) | {"uuid": "cat"}
    again, zeros = {"type": "image_embeds", "image_embeds": None, "uuid": "cat"}, embeds_part(bytes(len(data)))
    zeros["image_embeds"] |= {"dtype": dtype, "shape": [count, HIDDEN_SIZE]}
    async with serve(folder=folder, enable_mm_embeds=True) as served:
        messages = chat("ab", part, "c", again, image_part(data_url()), zeros)
        request = await sent(served, "/v1/chat/completions", {"messages": messages})
        body = {"model": served.model, "messages": messages}
        tokens = (await served.client.post("/tokenize", json=body)).json()["tokens"]

        before, (token,), after = served.ids("ab"), served.ids(IMAGE), served.ids("c")
        assert request.prompts[0][: len(before) + count + len(after)] == (*before, *(token,) * count, *after)
        assert tuple(tokens) == request.prompts[0]
        (images,) = request.images
        assert [(one.count, one.data, one.dtype) for one in images] == [
            (count, data, dtype), (count, data, dtype), (NUM_TOKENS, PNG, ""), (count, bytes(len(data)), dtype)
        ]  # fmt: skip
        assert images[0].digest == images[1].digest
        assert len({one.digest for one in images}) == 3
        assert served.context.images.budget.num_bytes == 0


async def test_a_typed_placeholder_stays_text(serve: Any, folder: Path) -> None:
    typed = f"a {IMAGE} b"
    async with serve(folder=folder) as served:
        request = await sent(served, "/v1/chat/completions", {"messages": chat(typed, image_part(data_url()), IMAGE)})

        ids, (token,) = request.prompts[0], served.ids(IMAGE)
        assert ids.count(token) == NUM_TOKENS
        ((start, count, _),) = placed(request)
        decode = served.context.tokens.decode
        assert (decode(ids[:start]), decode(ids[start + count :])) == (typed, IMAGE)
        alone = await sent(served, "/v1/chat/completions", {"messages": chat(typed)})
        assert (alone.images, alone.prompts[0]) == ((), ids[:start])


async def test_a_template_of_texts_gets_images_as_lines_before(serve: Any, tmp_path: Path) -> None:
    async with serve(folder=write_vision_model(tmp_path, TEXT)) as served:
        request = await sent(served, "/v1/chat/completions", {"messages": chat("hello", image_part(data_url()), "you")})

        before = served.ids("user: ")
        assert placed(request) == [(len(before), NUM_TOKENS, PNG)]
        assert request.prompts[0][len(before) + NUM_TOKENS :] == served.ids("\nhello\nyou\n")


@pytest.mark.covers("B.images.3")
async def test_images_come_from_servers_and_the_allowed_folder(serve: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(PNG)
    async with (
        raw_server(in_turn(ok(OTHER))) as server,
        serve(folder=folder, allowed_local_media_path=str(tmp_path), **HERE) as served,
    ):
        parts = image_part(server.url("/cat?x=1")), image_part(f"file://{tmp_path}/a%20b.png")
        request = await sent(served, "/v1/chat/completions", {"messages": chat(*parts)})

        assert [data for _, _, data in placed(request)] == [OTHER, PNG]
        assert [one.target for one in server.requests] == ["/cat?x=1"]


@pytest.mark.covers("B.images.8")
async def test_counts_of_tokens_include_images(serve: Any, folder: Path) -> None:
    async with serve(folder=folder) as served:
        body = {"model": served.model, "messages": chat("ab", image_part(data_url()))}
        tokens = (await served.client.post("/tokenize", json=body)).json()
        source = {"type": "image", "source": ANTHROPIC}
        counted = await served.client.post(
            "/v1/messages/count_tokens", json={"model": served.model, "messages": chat("ab", source)}
        )

        assert tokens["count"] == counted.json()["input_tokens"] == len(served.ids("ab")) + NUM_TOKENS


@pytest.mark.covers("B.images.7")
async def test_bytes_are_given_back_when_answers_end(serve: Any, folder: Path) -> None:
    body = {"messages": chat(image_part(data_url()))}
    async with serve(folder=folder, max_image_bytes=len(PNG) + 10, enable_mm_embeds=True) as served:
        for stream in (False, True, False):
            await sent(served, "/v1/chat/completions", body | {"stream": stream})
        for second in (image_part(data_url()), embeds_part()):
            messages = chat(image_part(data_url()), second)
            refused = await served.client.post(
                "/v1/chat/completions", json={"model": served.model, "messages": messages}
            )

            assert refused.status_code == 429
            assert (
                f"more would exceed the limit of {len(PNG) + 10} (--max-image-bytes)"
                in refused.json()["error"]["message"]
            )
        assert served.context.images.budget.num_bytes == 0


@pytest.mark.covers("B.images.7")
async def test_running_requests_share_one_limit_of_bytes(serve: Any, folder: Path) -> None:
    body = {"messages": chat(image_part(data_url()))}
    async with serve(folder=folder, max_image_bytes=len(PNG) + 10) as served:
        served.dispatcher.hold_after = 1
        running = asyncio.create_task(sent(served, "/v1/chat/completions", body))
        await asyncio.wait_for(served.dispatcher.held.wait(), 10)
        served.dispatcher.hold_after = None
        refused = await served.client.post("/v1/chat/completions", json={"model": served.model} | body)
        running.cancel()
        await asyncio.wait({running}, timeout=10)

        assert refused.status_code == 429
        assert "the images of running requests have" in refused.json()["error"]["message"]
        await sent(served, "/v1/chat/completions", body)
