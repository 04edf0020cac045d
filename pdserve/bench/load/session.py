"""The HTTP connections of a load: unlimited, with a timeout per request."""

import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from pdserve.bench.load.dialect import error_message
from pdserve.client import own_key, trusting
from remote_files.os_errors import system_message
from wire.errors import Unavailable

_KEYS = "$PDSERVE_API_KEY, $VLLM_API_KEY or $OPENAI_API_KEY"


def open_session(headers: Mapping[str, str], timeout_s: float, environ: Mapping[str, str]) -> aiohttp.ClientSession:
    """Return a session that sends `headers`, and the environment's API key if they have none."""
    connector = aiohttp.TCPConnector(limit=0, ssl=trusting(environ.get("PDSERVE_CERT_FILE")))
    shown = dict(headers)
    key = api_key(environ)
    if key is not None and not any(name.lower() == "authorization" for name in shown):
        shown["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(connector=connector, headers=shown, timeout=aiohttp.ClientTimeout(total=timeout_s))


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the API key to send, from pdserve's own variables, else from $OPENAI_API_KEY; None if there is none."""
    return own_key(environ) or environ.get("OPENAI_API_KEY", "").strip() or None


async def get_json(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON response of a GET, or a POST of `body`. Raises Unavailable."""
    try:
        async with http.request("GET" if body is None else "POST", url, json=body) as response:
            content, status = await response.read(), response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {_reason(error)}") from error
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        message = f"{url} returned HTTP {status} with a body that is not JSON"
        raise Unavailable(f"{message}: is --base-url the URL of an OpenAI-compatible server?") from error
    if status != 200:
        key = f"; a key is read from {_KEYS}" if status == 401 else ""
        raise Unavailable(f"{url} returned HTTP {status}: {error_message(answer)}{key}")
    return answer


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {system_message(error.os_error)}"
    return str(error) or type(error).__name__
