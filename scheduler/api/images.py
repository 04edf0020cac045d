"""Load the images of a conversation for a route: refused for models without vision, counted until the answer's end."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Scope

from scheduler.api.prepared_request import cache_salt_of
from scheduler.app_context import AppContext
from scheduler.images.image_limits import HeldImageBytes
from scheduler.images.image_part import Message, images_in
from wire.errors import InvalidRequest

HELD = "held_image_bytes"
"""The key of a request's HeldImageBytes in the state of its scope."""


async def load_images(
    context: AppContext, request: Request, messages: Sequence[Message], salt: str | None = None
) -> Sequence[Message]:
    """Return the conversation with its images loaded; `salt` is the body's cache_salt.

    Raises InvalidRequest that names the part, Overloaded, Unavailable.
    """
    paths = [image.path for image in images_in(messages)]
    if not paths:
        return messages
    if context.images is None:
        model = context.config.engine.served_names()[0]
        raise InvalidRequest(f"{paths[0]}: an image, but the model {model} takes text only", paths[0])
    state = request.scope["state"]
    held = state.setdefault(HELD, HeldImageBytes(context.images.budget))
    return await context.images.load(messages, held, cache_salt_of(context, str(state.get("tenant", "")), salt))


def release_images(scope: Scope) -> None:
    """Give the image bytes of a request back. Idempotent."""
    held: HeldImageBytes | None = scope["state"].pop(HELD, None)
    if held is not None:
        held.release()
