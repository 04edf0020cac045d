"""GET /v1/models and /v1/models/{id}: with the fields of OpenAI's, vLLM's and Anthropic's models."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.errors import json_response
from scheduler.app_context import AppContext


async def list_models(context: AppContext, _: Request) -> Response:
    """Return a card for each served name, or for --model as given if there are none."""
    engine = context.config.engine
    names = engine.served_model_name or (engine.model,)
    data = [_model_card(context, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": data, **page})


async def retrieve_model(context: AppContext, request: Request) -> Response:
    """Return the card of one served name. Raises UnknownModel."""
    name = request.path_params["name"]
    context.model_named(name)
    return json_response(_model_card(context, name))


def _model_card(context: AppContext, name: str) -> dict[str, Any]:
    length = context.tokens.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "pdserve",
        "root": context.config.engine.model,
        "parent": None,
        "max_model_len": length,
        "permission": [],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }
