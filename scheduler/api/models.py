"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.errors import json_response
from scheduler.app_context import AppContext


async def list_models(front: AppContext, _: Request) -> Response:
    """Return a card for each served name; without any, for --model as given."""
    engine = front.config.engine
    names = engine.served_model_name or (engine.model,)
    return json_response({"object": "list", "data": [_card(front, name) for name in names]})


async def retrieve_model(front: AppContext, request: Request) -> Response:
    """Return the card of one served name. Raises UnknownModel."""
    name = request.path_params["name"]
    front.model_named(name)
    return json_response(_card(front, name))


def _card(front: AppContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "pdserve",
        "root": front.config.engine.model,
        "parent": None,
        "max_model_len": front.tokens.max_model_len,
        "permission": [],
    }
