"""GET /docs, with --enable-docs: the OpenAPI document as one page without scripts or external resources."""

import functools
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from scheduler.api.route_entry import Endpoint
from scheduler.app_context import AppContext

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "summary{cursor:pointer}code{background:#eee}td,th{text-align:left;padding:.1em 1em .1em 0;vertical-align:top}"
)


def endpoint_of(document: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that renders `document`, an OpenAPI document, once."""
    page = functools.cache(lambda: render(document))

    async def docs(context: AppContext, _: Request) -> ASGIApp:
        return Response(page(), 200, _HEADERS, "text/html; charset=utf-8")

    return docs


def render(document: Mapping[str, Any]) -> str:
    """Return the page: each route with the fields of its body."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Machine-readable: <a href=openapi.json>openapi.json</a></p>"
        f"{''.join(_route_sections(document))}</html>\n"
    )


def _route_sections(document: Mapping[str, Any]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, one in operations.items():
            operation = _operation_html(method.upper(), path, one, document["components"]["schemas"])
            by_tag.setdefault(one["tags"][0], []).append(operation)
    for tag, section in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(section)}"


def _operation_html(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    head = f"<code>{escape(method)} {escape(path)}</code> {escape(operation['summary'])}"
    if "requestBody" not in operation:
        return f"<p>{head}</p>"
    body = operation["requestBody"]["content"]["application/json"]
    fields = _fields(schemas[body["schema"]["$ref"].rpartition("/")[2]]) if "$ref" in body["schema"] else ""
    example = f"<p><code>{escape(json.dumps(body['example']))}</code></p>"
    return f"<details><summary>{head}</summary>{example}{fields}</details>"


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_type_name(field))}"
        f"<td>{'required' if name in required else ''}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{rows}</table>"


def _type_name(field: Mapping[str, Any]) -> str:
    """Return the type as text, such as `integer or null`, with its bounds."""
    if "anyOf" in field:
        return " or ".join(_type_name(one) for one in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"array of ({_type_name(field.get('items', {}))})"
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if key in field]
    return f"{kind} {' and '.join(bounds)}".strip()


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
