"""GET /openapi.json and /docs describe what is served."""

import asyncio
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import jsonschema
import openapi_spec_validator
import pytest
from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.generation_body import ChatBody
from scheduler.api.messages import read_messages
from scheduler.api.route_entry import Route
from scheduler.app import open_routes
from scheduler.app_context import AppContext
from scheduler.config import SchedulerOptions

pytestmark = pytest.mark.anyio


async def test_the_description_is_valid_and_names_every_open_route(serve: Any) -> None:
    async with serve(enable_docs=True) as served:
        document = (await served.client.get("/openapi.json")).json()

    openapi_spec_validator.validate(document)
    reported = {(method, path) for path, operations in document["paths"].items() for method in operations}
    described = {"/openapi.json", "/docs"}
    assert reported == {
        (method.lower(), route.path.replace(":path", ""))
        for route in open_routes(SchedulerOptions(enable_docs=True))
        for method in route.methods.split()
        if route.path not in described
    }


def test_the_api_description_says_if_keys_are_needed() -> None:
    options = SchedulerOptions(root_path="/llm")
    for keyed, protect, expected in (
        (False, False, ()),
        (True, False, ("/load",)),
        (True, True, ("/load", "/metrics")),
    ):
        (front,) = [
            route for route in open_routes(replace(options, protect_metrics=protect), keyed=keyed)
            if route.path == "/openapi.json"
        ]  # fmt: skip
        document = asyncio.run(_body(front))
        assert document["servers"] == [{"url": "/llm"}]
        fields = {
            path for path in ("/health", "/metrics", "/load")
            if document["paths"][path]["get"].get("security", document.get("security", []))
        }  # fmt: skip
        assert fields == set(expected)
    openapi_spec_validator.validate(document)


async def _body(route: Route) -> Any:
    """Return the body class of a route that needs neither app nor request."""
    response = cast("Response", await route.endpoint(cast("AppContext", None), cast("Request", None)))
    return json.loads(bytes(response.body))


async def test_bodies_are_described_with_their_bounds(serve: Any) -> None:
    async with serve() as served:
        document = (await served.client.get("/openapi.json")).json()

    operation = document["paths"]["/v1/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/CompletionBody"
    }
    body = document["components"]["schemas"]["CompletionBody"]
    assert body["required"] == ["prompt"]
    assert [kind["type"] for kind in body["properties"]["prompt"]["anyOf"]] == ["string", "array", "array", "array"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in body["properties"]["temperature"]["anyOf"]
    listing = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [(one["name"], one["in"], one.get("required", False)) for one in listing] == [
        ("response_id", "path", True), ("limit", "query", False), ("order", "query", False), ("after", "query", False),
    ]  # fmt: skip
    assert listing[1]["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "name": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "uuid": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "a", "reasoning": "hm"},
    ],
)
def test_messages_that_are_read_fit_their_description(message: dict[str, Any]) -> None:
    schema = ChatBody.model_json_schema()

    assert len(read_messages([message])) == 1
    jsonschema.validate({"messages": [message]}, schema)


@pytest.mark.parametrize("use_openai", ["0", "1"])
def test_each_route_with_a_body_has_an_example_of_it(use_openai: str) -> None:
    for route in open_routes(SchedulerOptions(use_openai=use_openai)):
        if route.body is not None:
            assert route.body.read(route.example or {})
            with pytest.raises(AssertionError, match=route.path):
                replace(route, example=None)


@pytest.mark.parametrize("use_openai", ["0", "1"])
def test_the_docs_page_names_every_route(use_openai: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")

    opened = SchedulerOptions(
        use_openai=use_openai, enable_docs=True, enable_tokenizer_info_endpoint=True, enable_dev_routes=True
    )
    assert [route.path for route in open_routes(opened) if route.path.replace(":path", "") not in page] == []


@pytest.mark.covers("B.ops.7")
async def test_docs_are_served_by_flag_alone(serve: Any) -> None:
    async with serve() as served:
        assert (await served.client.get("/docs")).status_code == 404


async def test_docs_are_one_page_that_loads_nothing(serve: Any) -> None:
    async with serve(enable_docs=True) as served:
        response = await served.client.get("/docs")
        document = (await served.client.get("/openapi.json")).json()

    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = _Page(response.text)
    assert page.loads == []
    assert {path for path in document["paths"] if path not in page.text} == set()
    assert "max_completion_tokens" in page.text


class _Page(HTMLParser):
    """The text of a page, and the URLs that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.loads: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag in ("script", "link", "img", "iframe") or "src" in names:
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data
