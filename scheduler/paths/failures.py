"""What an instance's bad ending of a prompt means to the request."""

from scheduler.inbox import SessionLost
from scheduler.instances import Instance
from scheduler.prompt_run import PromptRun
from telemetry.logs import EventLogger
from wire.errors import (
    Cancelled,
    Draining,
    HandoffFailed,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
    PdserveError,
    from_name,
)
from wire.messages import Failed, Refused

log = EventLogger("paths")

_TOLD: dict[type[PdserveError], str] = {
    HandoffFailed: "the KV did not get from the prefill to the decode instance",
    InstanceLost: "its link to the other instance broke",
    NoCapacity: "it has no free KV blocks",
    Draining: "it is shutting down",
    Cancelled: "the prompt was cancelled there",
}
"""What clients are told: an instance's own words may name addresses and tickets, and go to the log."""


def to_error(ending: Refused | Failed | SessionLost, instance: Instance, prompt: PromptRun) -> PdserveError:
    """Return the error to raise, and close the instance to new prompts if it said it is full."""
    if isinstance(ending, SessionLost):
        return ending.error
    error = from_name(ending.error, ending.message)
    if isinstance(error, NoCapacity):
        instance.books.refused()
    if isinstance(error, InvalidRequest):
        return error
    report = log.debug if isinstance(error, NoCapacity) else log.warning  # a full pool refuses often, and nothing ends
    report(
        "prompt_ended_badly", request_id=prompt.request.request_id, prompt_id=ending.prompt_id, instance=instance,
        address=instance.address, error=ending.error, message=ending.message,
    )  # fmt: skip
    return type(error)(f"{instance}: {_TOLD.get(type(error), 'it could not go on; the log says why')}")
