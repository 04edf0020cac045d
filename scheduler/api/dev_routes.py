"""GET /server_info and POST /reset_prefix_cache, for development: with --enable-dev-routes, under vLLM's names."""

import dataclasses
import functools
import importlib.metadata
import os
import platform
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.errors import json_response
from scheduler.api.ops import own_version
from scheduler.app_context import AppContext
from wire.errors import InvalidRequest

_PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "pydantic", "starlette", "llguidance")
_PREFIXES = ("PDSERVE_", "VLLM_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


async def server_info(context: AppContext, request: Request) -> Response:
    """Return the flags, the variables and the versions of this process, without secrets."""
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise InvalidRequest(f"config_format is {form[:40]!r}, but must be text or json", "config_format")
    flags = {"engine": _flags(context.config.engine), "scheduler": _flags(context.config.options)}
    body = {
        "vllm_config": flags if form == "json" else str(flags),
        "vllm_env": {name: value for name, value in sorted(os.environ.items()) if _is_shown(name)},
        "system_env": _system(),
    }
    return json_response(body)


async def reset_prefix_cache(context: AppContext, request: Request) -> Response:
    """Make later requests ignore everything that is cached; running ones continue, so this always succeeds."""
    context.salt_of_all.renew()
    return json_response({"success": True})


def _flags(options: Any) -> dict[str, Any]:
    shown = (field for field in dataclasses.fields(options) if not field.metadata.get("secret"))
    return {field.name: getattr(options, field.name) for field in shown}


def _is_shown(name: str) -> bool:
    return name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)


@functools.cache
def _system() -> dict[str, Any]:
    versions = dict[str, str | None]()
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "pdserve": own_version(), "python": platform.python_version(), "platform": platform.platform(),
        "packages": versions,
    }  # fmt: skip
