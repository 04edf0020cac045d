"""Convert the error that ended a prompt on a worker to the event that an instance would send."""

from telemetry.logs import EventLogger
from wire.errors import (
    HandoffFailed,
    InstanceLost,
    InternalError,
    InvalidRequest,
    NoCapacity,
    OutputDiffers,
    PdserveError,
    Unavailable,
)
from wire.messages import Failed, Refused
from wire.types import PromptState

_log = EventLogger("workers")


def failure_of(prompt: PromptState, error: Exception) -> Refused | Failed:
    """Return the event for the error; the prompt is retried elsewhere unless the request is invalid."""
    prompt_id = prompt.prompt_id
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    match error:
        case InvalidRequest() | NoCapacity():
            return Refused.with_error(prompt_id, error)
        case HandoffFailed() | OutputDiffers():
            return Failed(prompt_id, type(error).__name__, str(error))
        case Unavailable():
            return Failed(prompt_id, InstanceLost.__name__, str(error))
        case PdserveError():
            return Failed(prompt_id, InternalError.__name__, str(error))
    _log.error("worker_prompt_failed", error, request_id=prompt.request_id, prompt_id=prompt_id)
    return Failed(prompt_id, InternalError.__name__, f"internal error: {error!r}")
