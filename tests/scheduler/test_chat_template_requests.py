"""Chat template options of a request over HTTP, on every route that takes `messages`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
PATHS = ("/v1/chat/completions", "/tokenize", "/v1/embeddings")
LOOPS = "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"


async def prompt_of(served: Any, **fields: Any) -> str:
    """Return the text that the model continues for a chat with `fields`."""
    body = {"model": served.model, "messages": HELLO} | fields
    response = await served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(served.context.tokens.decode(served.dispatcher.requests[-1].prompts[0], skip_special_tokens=False))


async def refusals_of(served: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the error of each route."""
    body = {"model": served.model, "messages": HELLO} | fields
    responses = [await served.client.post(path, json=body) for path in PATHS]
    assert [response.status_code for response in responses] == [400, 400, 400], [r.text for r in responses]
    return [response.json()["error"] for response in responses]


async def test_a_requests_template_gets_its_variables_and_documents(serve: Any) -> None:
    template = "{{ messages[0].content }}|{{ mood }}|{{ documents[0].title }}|{{ add_generation_prompt }}"
    documents = [{"title": "fox", "text": "brown"}]
    async with serve() as served:
        text = await prompt_of(
            served, chat_template=template, chat_template_kwargs={"mood": "dry"}, documents=documents
        )

        assert text == "hello|dry|fox|True"


async def test_the_operators_variables_are_defaults(serve: Any) -> None:
    async with serve(default_chat_template_kwargs='{"mood": "dry", "pace": "slow"}') as served:
        text = await prompt_of(served, chat_template="{{ mood }} {{ pace }}", chat_template_kwargs={"mood": "warm"})

        assert text == "warm slow"


async def test_parts_reach_a_template_that_loops_over_them(serve: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serve() as served:
        assert await prompt_of(served, chat_template=LOOPS) == "[text:hello]"
        messages = [{"role": "user", "content": parts}]
        assert await prompt_of(served, chat_template=LOOPS, messages=messages) == "[text:a][text:b]"
        assert "a\nb<|im_end|>" in await prompt_of(served, messages=messages)


async def test_the_content_format_is_the_operators(serve: Any) -> None:
    async with serve(chat_template_content_format="string") as served:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]

        assert await prompt_of(served, chat_template="{{ messages[0].content }}", messages=messages) == "a"


async def test_the_last_message_is_left_open(serve: Any) -> None:
    last = {"role": "assistant", "content": "Well "}
    async with serve() as served:
        text = await prompt_of(
            served, messages=[*HELLO, last], continue_final_message=True, add_generation_prompt=False
        )

        assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell "


async def test_no_route_accepts_a_forbidden_template(serve: Any) -> None:
    async with serve(trust_request_chat_template=False) as served:
        for error in await refusals_of(served, chat_template="{{ 1 }}"):
            assert "chat_template_not_allowed" in error["message"]
            assert error["param"] == "chat_template"
        for error in await refusals_of(served, chat_template_kwargs={"chat_template": "{{ 1 }}"}):
            assert error["param"] == "chat_template_kwargs.chat_template"
        assert served.dispatcher.requests == []


async def test_no_route_accepts_a_reserved_name(serve: Any) -> None:
    async with serve() as served:
        for name in ("tokenize", "messages", "self", "bos_token", "add_generation_prompt", "chat_template"):
            for error in await refusals_of(served, chat_template_kwargs={name: 1}):
                assert error["param"] == f"chat_template_kwargs.{name}"
                assert name in error["message"]
        assert served.dispatcher.requests == []


BAD = {
    "{% for %}": "TemplateSyntaxError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ cycler.__init__.__globals__ }}": "SecurityError",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{% include '/etc/passwd' %}": "no loader",
    "": "empty",
}


async def test_a_bad_template_is_400_on_every_route(serve: Any) -> None:
    async with serve() as served:
        for template, words in BAD.items():
            for error in await refusals_of(served, chat_template=template):
                assert words in error["message"]
                assert error["param"] == "chat_template"
                assert error["type"] == "invalid_request_error"
            assert await prompt_of(served) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_an_endless_template_is_400_and_no_chat_waits_for_it(serve: Any) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with serve() as served:
        await prompt_of(served, chat_template="both processes are there now")
        await served.context.tokens.start()
        body = {"model": served.model, "messages": HELLO, "chat_template": endless}
        slow = asyncio.create_task(served.client.post("/v1/chat/completions", json=body))
        for _ in range(3):
            await prompt_of(served)
        answered_before = not slow.done()
        refused = await slow

        assert answered_before
        assert refused.status_code == 400
        assert "more than 1 s of CPU time" in refused.json()["error"]["message"]


@pytest.mark.covers("A5.75")
async def test_a_model_without_a_template_accepts_the_requests(serve: Any, make_model: Any) -> None:
    async with serve(folder=make_model(chat_template=None)) as served:
        for error in await refusals_of(served):
            assert "no chat template" in error["message"]
        assert await prompt_of(served, chat_template="{{ messages[0].content }}") == "hello"
        body = {"model": served.model, "prompt": "hello"}
        assert (await served.client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.covers("A5.74")
@pytest.mark.parametrize(
    "typed",
    [
        "./examples/template_chatml.jinja",
        r"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        r"<|im_start|>assistant{{ '\n' }}",
    ],
    ids=["file", "inline"],
)
async def test_the_operators_template_is_a_file_or_the_text_itself(
    serve: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    async with serve(folder=make_model(chat_template="{{ 1 }}"), chat_template=typed) as served:
        assert await prompt_of(served) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ lipsum.__globals__['os'].popen('id').read() }}", "SecurityError"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s of CPU",
            marks=pytest.mark.long,
        ),
        ("{{ 'a' * 10**9 }}", "MemoryError"),
    ],
)
async def test_a_models_template_is_trusted_no_more_than_a_requests(
    serve: Any, make_model: Any, template: str, words: str
) -> None:
    async with serve(folder=make_model(chat_template=template)) as served:
        body = {"model": served.model, "messages": HELLO}
        refused = await served.client.post("/v1/chat/completions", json=body)
        completed = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hello"})

        assert (refused.status_code, completed.status_code) == (400, 200)
        assert words in refused.json()["error"]["message"]
