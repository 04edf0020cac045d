"""Each route, whole and streamed, answers the same by one combined instance, over P/D, and with a D killed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.app import OLD_ROUTES, OPENAI_ROUTES
from tests.conformance.joined_answers import Answer, Json
from tests.conformance.route_clusters import RouteClient, clients_of
from tests.conformance.route_table import (
    ALL_ROWS,
    BUDGET,
    CITIES,
    CLASSIFIER_ROWS,
    CUT,
    GENERATE,
    GENERATE_ROWS,
    IMAGE_ROWS,
    ROWS,
    WAYS,
    RouteRow,
)
from tests.conformance.scripted_model import (
    ANSWER,
    BEFORE_CALLS,
    NUM_TOKENS,
    PLAN,
    THINKING,
    make_scripted_model,
    text_of,
)  # fmt: skip
from tests.engine.tiny_encoders import make_decoder_classifier
from tests.engine.tiny_models import save_tiny_tokenizer
from tests.images.image_files import file_of, image_of
from tests.instance.image_prompts import ImageModel, make_chat_model

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Expected:
    """What the script of the model makes of a row. Calls have a name and arguments, or text that is no JSON."""

    text: str = text_of(ANSWER)
    thinking: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = "stop"
    num_tokens: int = len(ANSWER) + 1


_CALLS = Expected(
    text_of(BEFORE_CALLS), text_of(PLAN),
    (("weather", {"city": "Zürich ☀ or <tool_call>", "days": [1, 2]}), ("now", {})), "tool_calls", NUM_TOKENS["tools"],
)  # fmt: skip
_CUT = replace(
    _CALLS, calls=(("weather", '{"city": "Zürich \N{REPLACEMENT CHARACTER}'),), finish="length", num_tokens=CUT
)
_BUDGET = Expected(thinking=text_of(THINKING[:BUDGET]), num_tokens=len(ANSWER) + BUDGET + 3)
EXPECTED = {
    "chat": Expected(),
    "thinking": Expected(thinking=text_of(THINKING), num_tokens=NUM_TOKENS["text"]),
    "budget": _BUDGET,
    "calls": _CALLS,
    "invocations": _CALLS,
    "choices-calls": replace(_CALLS, num_tokens=2 * _CALLS.num_tokens),
    "stops": _CALLS,
    "cut": _CUT,
    "functions": replace(_CALLS, calls=_CALLS.calls[:1], finish="function_call"),
    "message": Expected(finish="end_turn"),
    "message-budget": replace(_BUDGET, finish="end_turn"),
    "message-calls": replace(_CALLS, finish="tool_use"),
    "response": Expected(finish="completed"),
    "response-budget": replace(_BUDGET, finish="completed"),
    "response-calls": replace(_CALLS, finish="completed"),
    "response-cut": replace(_CUT, finish="incomplete"),
    "background": replace(_CALLS, finish="completed"),
}
HOPS = {"combined": ("local", ""), "shm": ("handoff", "shm"), "tcp": ("handoff", "tcp")}
"""The path of a prompt and its transport."""
FORCED = {
    "required": "tool_calls", "named": "stop", "function": "stop", "message-forced": "tool_use",
    "response-required": "completed",
}  # fmt: skip
"""The reason for which rows with one forced call finish."""


@pytest.fixture(scope="module")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers think and call tools."""
    return make_scripted_model(tmp_path_factory.mktemp("routes") / "model")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with three classes."""
    folder = make_decoder_classifier("qwen3", tmp_path_factory.mktemp("classifier") / "model", num_labels=3)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """A model that takes images."""
    return make_chat_model(tmp_path_factory.mktemp("images") / "llava")


@pytest.fixture(scope="module")
def client(
    request: pytest.FixtureRequest, scripted_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouteClient]:
    """A client of a cluster, which all rows of a way share."""
    with clients_of(request.param, scripted_model, tmp_path_factory.mktemp(request.param)) as client:
        yield client


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """What the first way answered to each row."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("client", WAYS, indirect=True)
def test_a_route_answers_the_same(client: RouteClient, row: RouteRow, answers: dict[str, Answer]) -> None:
    answer = _same_answer(client, row, answers)
    if row.killed_at is not None:
        _check_script(row, answer.shown)


@pytest.mark.covers("A10.146", "B.images.1", "B.images.2")
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_images_answer_the_same(way: str, chat_model: ImageModel, answers: dict[str, Answer], tmp_path: Path) -> None:
    with clients_of(way, chat_model.folder, tmp_path) as client:
        for row in IMAGE_ROWS:
            answer = _same_answer(client, row, answers)
            assert "encode" in answer.served["stages_ms"]
            if row.name == "image-chat":
                (choice,) = answer.shown["choices"]
                body = {"model": "tiny", "messages": row.body["messages"]}
                prompt = httpx.post(f"{client.url}/tokenize", json=body, timeout=300, trust_env=False).json()["tokens"]
                assert choice["token_ids"] == chat_model.continued(prompt, [file_of(image_of(30, 20))], 12)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_classifier_answers_the_same(
    way: str, classifier: Path, answers: dict[str, Answer], tmp_path: Path
) -> None:  # fmt: skip
    with clients_of(way, classifier, tmp_path) as client:
        for row in CLASSIFIER_ROWS:
            answer = _same_answer(client, row, answers)
            assert [one["num_classes"] for one in answer.shown["data"]] == [3, 3]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_legacy_route_answers_the_same(
    way: str, scripted_model: Path, answers: dict[str, Answer], tmp_path: Path
) -> None:
    with clients_of(way, scripted_model, tmp_path, "--use-openai=0") as client:
        for row in GENERATE_ROWS:
            first, second = _same_answer(client, row, answers).shown["text"]
            assert first != second


def test_each_route_that_takes_a_prompt_has_a_row() -> None:
    """Those of a stored response have an id in their path: tests/cluster/test_stored_responses.py."""
    posts = (one.path for one in (*OPENAI_ROUTES, *OLD_ROUTES) if one.methods == "POST")
    assert {row.route for row in ALL_ROWS} == {path for path in posts if "{" not in path}


def _same_answer(client: RouteClient, row: RouteRow, answers: dict[str, Answer]) -> Answer:
    """Return the answer to a row, which is the one of the first way, whole as streamed."""
    is_vector = row.killed_at is None
    answer = client.whole(row) if is_vector else client.streamed(row)
    known = answers.setdefault(row.name, answer)

    assert answer.shown == known.shown
    assert answer.numbers == pytest.approx(known.numbers, abs=1e-4)
    if is_vector:
        return answer
    if client.way in HOPS and row.route != GENERATE:  # whose answers have texts only
        served = answer.served[0] if isinstance(answer.served, list) else answer.served
        assert (served["path"], served["transport"]) == HOPS[client.way]
    whole = client.whole(row)
    assert whole.shown == answer.shown
    assert whole.numbers == pytest.approx(answer.numbers, abs=1e-4)
    return answer


def _check_script(row: RouteRow, shown: Json) -> None:
    """Check what is known of the answer without another one."""
    found = [_found(choice, shown) for choice in shown.get("choices", [shown])]
    if row.name in EXPECTED:
        assert found == [EXPECTED[row.name]] * row.body.get("n", 1)
    elif row.name in FORCED:
        ((name, arguments),) = found[0].calls
        assert (name, found[0].finish) == ("weather", FORCED[row.name])
        _check_city(arguments)
    elif row.name.endswith("structured"):
        assert found[0].thinking == text_of(THINKING)
        _check_city(json.loads(found[0].text))
    else:
        assert {one.finish for one in found} == {"length"}
        assert found[0].num_tokens == len(found) * row.body.get("sampling_params", row.body)["max_tokens"]


def _found(choice: Json, shown: Json) -> Expected:
    """Return a choice, a message or a response in the same form as what is expected."""
    usage = shown["usage"]
    if "output" in choice:
        texts = {"message": "", "reasoning": ""}
        for item in choice["output"]:
            texts[item["type"]] = "".join(part["text"] for part in item.get("content", ()))
        called = [one for one in choice["output"] if one["type"] == "function_call"]
        calls = tuple((one["name"], _parsed(one["arguments"])) for one in called)
        return Expected(texts["message"], texts["reasoning"], calls, choice["status"], usage["output_tokens"])
    if "blocks" in choice:
        blocks = choice["blocks"]
        text, thinking = ("".join(one.get(name, "") for one in blocks) for name in ("text", "thinking"))
        calls = tuple((one["name"], one["input"]) for one in blocks if one["type"] == "tool_use")
        return Expected(text, thinking, calls, choice["stop_reason"], usage["output_tokens"])
    legacy = [choice["function_call"]] if choice["function_call"] else []
    calls = tuple((one["name"], _parsed(one["arguments"])) for one in [*choice["calls"], *legacy])
    return Expected(choice["text"], choice["reasoning"], calls, choice["finish_reason"], usage["completion_tokens"])


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _check_city(value: Json) -> None:
    assert value["city"] in CITIES
    assert value == {"city": value["city"], "cold": value["cold"] is True}
