"""A2: what clients of the legacy API expect of an OpenAI server, combined and over P/D."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.cli import main
from tests.cluster.conftest import ENGINE_FLAGS
from tests.conformance.served import CHAT, PROMPT, Oracle, Served, events

pytestmark = pytest.mark.cluster

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}
EMBEDS = {"type": "image_embeds", "image_embeds": {"data": "AAA=", "dtype": "float16", "shape": [1, 1]}}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The official client; any key works, since none is required."""
    with openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key="EMPTY", max_retries=0, timeout=300) as client:
        yield client


@pytest.mark.covers("B.text.3", "B.text.4", "A2.28")
def test_models_are_listed_and_retrieved(served: Served, client: openai.OpenAI) -> None:
    card = served.http.get("/v1/models").json()["data"][0]

    assert (card["id"], card["object"], card["max_model_len"], card["parent"]) == ("tiny", "model", 512, None)
    of_vllm = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    of_anthropic = {"type", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens"}
    assert set(card) == of_vllm | of_anthropic
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.covers("B.text.2", "B.clients.1", "A2.29", "A2.34")
def test_chats_work_from_curl_and_from_the_client(served: Served, client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who won the world series in 2020?"},
    ]
    posted = served.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=8)
    made = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)

    message = {name: value for name, value in posted.json()["choices"][0]["message"].items() if value is not None}
    assert message == {"role": "assistant", "content": made.choices[0].message.content}


@pytest.mark.covers("B.text.1", "A2.30")
def test_the_first_completion_of_the_documents(served: Served, client: openai.OpenAI) -> None:
    fields: Any = {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    first, again = served.completion(**fields), served.completion(**fields)
    made = client.completions.create(model="tiny", **fields)

    assert first["usage"]["completion_tokens"] <= 7
    assert first["choices"] == again["choices"]
    assert made.choices[0].text == first["choices"][0]["text"]


@pytest.mark.covers("A2.31")
def test_another_model_is_404(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt=PROMPT)
    assert refused.value.param == "model"


@pytest.mark.covers("A2.33")
def test_without_a_key_any_or_none_is_accepted(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer EMPTY"}):
        answer = served.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}, headers=headers
        )
        assert answer.status_code == 200


@pytest.mark.covers("B.completion.1", "A2.36")
def test_the_four_forms_of_a_prompt_are_answered_prompt_major(served: Served, oracle: Oracle) -> None:
    texts = [PROMPT, "what is the capital"]
    ids = [oracle.ids(text) for text in texts]
    expected = [served.text(prompt=text) for text in texts]

    assert expected == [oracle.generate(text)[0] for text in texts]
    assert served.text(prompt=ids[0]) == expected[0]
    for prompts in (texts, ids):
        choices = served.completion(prompt=prompts)["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(expected))
    many = served.completion(prompt=texts, n=2, temperature=1.0, seed=3)["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    alone = served.completion(prompt=texts[1], n=2, temperature=1.0, seed=3)["choices"]
    assert [choice["text"] for choice in many[2:]] == [choice["text"] for choice in alone]


@pytest.mark.covers("A2.37")
def test_a_suffix_is_refused_with_a_reason(served: Served) -> None:
    assert served.refused(suffix="end")["message"] == (
        "suffix is not currently supported: fill-in-the-middle is not implemented"
    )


@pytest.mark.covers("B.chat.5", "A2.38")
def test_a_forced_tool_call_fits_its_schema_whole_and_streamed(served: Served) -> None:
    cities = {"type": "string", "enum": ["Paris", "Rome"]}
    weather = {"type": "object", "properties": {"city": cities, "cold": {"type": "boolean"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": weather}}]
    forced = {"tools": tools, "parallel_tool_calls": False, "temperature": 1, "seed": 7, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "f"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        body = forced | {"tool_choice": choice}
        (whole,) = served.chat(**body)["choices"]
        (call,) = whole["message"]["tool_calls"]
        response = served.post("/v1/chat/completions", messages=CHAT, stream=True, **body)
        deltas = [part["choices"][0]["delta"].get("tool_calls") for part in events(response)]
        first, *others = [delta[0] for delta in deltas if delta]

        assert (call["type"], call["function"]["name"], whole["finish_reason"]) == ("function", "f", finish)
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in cities["enum"]
        assert set(arguments) <= set(weather["properties"])
        assert (first["type"], first["function"]["name"]) == ("function", "f")
        assert not any("id" in part for part in others)
        streamed = "".join(part["function"]["arguments"] for part in (first, *others))
        assert streamed == call["function"]["arguments"]
    assert served.refused("/v1/chat/completions", tools=[])["param"] == "tools"


@pytest.mark.covers("A2.39")
def test_extra_body_and_merged_json_are_the_same(served: Served, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Classify this sentiment: pdserve is wonderful!"}]
    choices = ["positive", "negative"]
    extra = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, extra_body={"guided_choice": choices}
    )

    assert extra.choices[0].message.content in choices
    assert served.chat_text(messages, guided_choice=choices, max_tokens=60) == extra.choices[0].message.content


@pytest.mark.covers("A11.13", "A2.40")
def test_an_image_is_refused_with_a_reason_and_the_server_lives(served: Served) -> None:
    for image in (IMAGE, EMBEDS):
        messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
        refused = served.refused("/v1/chat/completions", messages=messages)

        assert refused["message"] == "messages.0.content.1 is an image, but the model tiny takes text only"
        assert refused["param"] == "messages.0.content.1"
    assert served.http.get("/health").status_code == 200


@pytest.mark.covers("B.chat.12")
def test_an_unknown_field_is_ignored(served: Served) -> None:
    assert served.text(metadata={"a": "b"}, store=True, service_tier="auto", unheard_of=[1]) == served.text()


@pytest.mark.covers("A2.25", "A2.26", "A2.27")
def test_serve_and_the_module_form_are_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ("--dtype", "auto", "--api-key", "token-abc123", "--port", port, *ENGINE_FLAGS[1:])
        command = [sys.executable, "-m", "pdserve.entrypoints.openai.api_server", "--model", str(model), *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

        assert main(["serve", str(model), *flags]) == ended.returncode == 2
    message = ended.stderr.rpartition(": ")[2]
    assert capsys.readouterr().err.rpartition(": ")[2] == message
    assert port in ended.stderr
