"""GET /openapi.json: the enabled routes and their bodies as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from scheduler.api.errors import json_response
from scheduler.api.route_entry import Endpoint, Route
from scheduler.app_context import AppContext

_SCHEMA = "#/components/schemas/"


def describe(
    routes: Sequence[Route], version: str, *, root_path: str = "", open_paths: frozenset[str] | None = None
) -> dict[str, Any]:
    """Return the document for `routes`, under the prefix `root_path`.

    `open_paths` are those that require no key, None if no path requires one.
    """
    paths: dict[str, dict[str, Any]] = {}
    bodies = dict.fromkeys((route.body, route.required) for route in routes if route.body is not None)
    for route in routes:
        operations = {method.lower(): _operation_schema(route, method) for method in route.methods.split()}
        paths.setdefault(_path(route), {}).update(operations)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": {**_body_schemas(tuple(bodies)), **_error_schemas(routes)}},
    }
    if open_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in open_paths & paths.keys():
            for operation in paths[path].values():
                operation["security"] = []
    return document


def endpoint_of(document: dict[str, Any]) -> Endpoint:
    """Return the endpoint that serves `document`."""

    async def openapi(context: AppContext, _: Request) -> ASGIApp:
        response: Response = json_response(document)
        return response

    return openapi


def _operation_schema(route: Route, method: str) -> dict[str, Any]:
    answer = {"content": {kind: {"schema": {"type": _schema_type(kind)}} for kind in route.media_types}}
    error_schema = _schema_ref(route.api_format.error_schema[0])
    error = {"description": "refused or failed", "content": {"application/json": {"schema": error_schema}}}
    operation: dict[str, Any] = {
        "operationId": _operation_id(route, method),
        "tags": [route.tag],
        "summary": route.summary,
        "responses": {"200": {"description": "answered", **answer}, "default": error},
    }
    if route.says_no:
        operation["responses"]["503"] = {"description": "no", **answer}
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.example is not None:
        schema = {"type": "object"} if route.body is None else _schema_ref(route.body.__name__)
        content = {"application/json": {"schema": schema, "example": route.example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


@functools.cache
def _body_schemas(bodies: tuple[tuple[type[BaseModel], tuple[str, ...]], ...]) -> dict[str, Any]:
    """Return the schemas of bodies with their required fields. Cached: this is nearly all of an app's build time."""
    models = dict.fromkeys(body for body, _ in bodies)
    _, made = models_json_schema([(body, "validation") for body in models], ref_template=_SCHEMA + "{model}")
    schemas: dict[str, Any] = made.get("$defs", {})
    for body, required in bodies:
        _mark_required(schemas[body.__name__], required)
    return schemas


def _error_schemas(routes: Sequence[Route]) -> dict[str, Any]:
    return dict(route.api_format.error_schema for route in routes)


def _mark_required(body: dict[str, Any], names: Sequence[str]) -> None:
    """Mark fields that are validated by hand as required: their null default only serves the hand-written check."""
    for name in names:
        field = body["properties"][name]
        field.pop("default", None)
        field["anyOf"] = [one for one in field["anyOf"] if one != {"type": "null"}]
    body["required"] = list(dict.fromkeys((*body.get("required", ()), *names)))


def _path(route: Route) -> str:
    return re.sub(r"{(\w+):path}", r"{\1}", route.path)


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)", route.path)
    in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return in_path + [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]


def _operation_id(route: Route, method: str) -> str:
    words = re.sub(r"\W+", "_", _path(route)).strip("_")
    return f"{method.lower()}_{words}"


def _schema_type(media_type: str) -> str:
    return "object" if media_type == "application/json" else "string"


def _schema_ref(name: str) -> dict[str, str]:
    return {"$ref": _SCHEMA + name}
