"""Errors as their clients see them, in the format of the route's API."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from scheduler.api.api_format import ApiFormat, ShownError
from scheduler.observability.request_log import without_values
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import InternalError, InvalidGrammar, NotInstalled, Overloaded, PdserveError, UnknownModel, appearance

_log = EventLogger("api")
_HTTP_TYPES = {404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error"}
_SHOWN_PATH = 128  # characters of an unknown path quoted in an error


class HttpError(Exception):
    """An HTTP-level refusal with its own status; `param` names the invalid field, if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def error_body(error: BaseException, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Log `error` and return its body; for an internal error the body has only the request id.

    Logging of errors that clients can cause is rate-limited per kind.
    """
    return _body(_shown_error(error, scope), scope)


def _shown_error(error: BaseException, scope: Mapping[str, Any]) -> ShownError:
    look, request_id = appearance(error), request_id_of(scope)
    if not isinstance(error, PdserveError) or isinstance(error, InternalError):
        _log.error("request_failed", error, request_id=request_id)
        return ShownError(f"internal error; see the log for request {request_id}", look.openai_type, None, 500)
    kind = type(error).__name__
    refusals: CappedLog = scope["state"]["refusals"]
    refusals.info("request_refused", kind, request_id=request_id, error=kind, message=without_values(error))
    return ShownError(str(error), look.openai_type, _param_of(error, scope), look.http_status)


def _param_of(error: PdserveError, scope: Mapping[str, Any]) -> str | None:
    """Return the path of the invalid field in the body, also if an instance refused an image or a structured output."""
    if isinstance(error, UnknownModel):
        return "model"
    named: str | None = getattr(error, "param", None)
    if named is None and isinstance(error, (InvalidGrammar, NotInstalled)):
        named = scope["state"].get("structured_by")
    paths: Mapping[str | None, str] = scope["state"].get("image_paths", {})
    return paths.get(named, named)


def error_response(error: BaseException, scope: Mapping[str, Any]) -> Response:
    """Log `error` and return its response; a refusal of path, method or body is not logged."""
    if isinstance(error, HttpError):
        return _http_response(error.status, str(error), None, scope, error.param)
    if isinstance(error, HTTPException):
        return _no_route_error(error, scope)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
        if error.is_final:
            headers["x-should-retry"] = "false"  # the header that the official clients read
    elif appearance(error).http_status == 503:
        headers["retry-after"] = "1"
    return _response(_shown_error(error, scope), headers, scope)


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `body` as JSON."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def unauthorized(scope: Mapping[str, Any]) -> Response:
    """Return the response to a request without a valid key; it reveals neither keys nor paths."""
    text = (
        "this server requires an API key: send a valid one in the header Authorization: Bearer KEY, or X-Api-Key: KEY"
    )
    return _response(ShownError(text, "authentication_error", None, 401), {"www-authenticate": "Bearer"}, scope)


def request_id_of(scope: Mapping[str, Any]) -> str:
    """Return the id that the gate assigned to this request."""
    return str(scope["state"]["request_id"])


def _no_route_error(error: HTTPException, scope: Mapping[str, Any]) -> Response:
    """Return the response to a request that has no route."""
    message, path, method = error.detail, scope["path"][:_SHOWN_PATH], scope["method"]
    if error.status_code == 404:
        message = f"no such path: {method} {path}; /openapi.json lists the paths"
    elif error.status_code == 405:
        message = f"{path} does not accept {method}; it accepts {(error.headers or {}).get('Allow', 'another method')}"
    return _http_response(error.status_code, message, error.headers, scope)


def _http_response(
    status: int, message: str, headers: Mapping[str, str] | None, scope: Mapping[str, Any], param: str | None = None
) -> Response:  # fmt: skip
    kind = _HTTP_TYPES.get(status, "invalid_request_error")
    return _response(ShownError(message, kind, param, status), headers, scope)


def _response(error: ShownError, headers: Mapping[str, str] | None, scope: Mapping[str, Any]) -> Response:
    api_format: ApiFormat = scope["state"]["api_format"]
    return json_response(_body(error, scope), api_format.status_of(error), headers)


def _body(error: ShownError, scope: Mapping[str, Any]) -> dict[str, Any]:
    state = scope["state"]
    api_format: ApiFormat = state["api_format"]
    return api_format.error_body(error, state["shown_id"])
