"""Convert an instance's failure of a prompt into the request's error."""

from scheduler.instances import Instance
from scheduler.prompt_on_instance import SessionLost
from scheduler.prompt_run import PromptRun
from telemetry.logs import EventLogger
from wire.errors import (
    Cancelled,
    Draining,
    HandoffFailed,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
    OutputDiffers,
    PdserveError,
    StreamMoved,
    from_name,
)
from wire.messages import Failed, Refused

_log = EventLogger("paths")

_STEPPED_S = 5.0

_MESSAGES: dict[type[PdserveError], str] = {
    HandoffFailed: "the KV transfer from the prefill to the decode instance failed",
    OutputDiffers: "the regenerated output differs from what was sent before",
    InstanceLost: "its link to the other instance broke",
    NoCapacity: "it has no free KV blocks",
    Draining: "it is shutting down",
    Cancelled: "the prompt was cancelled there",
    StreamMoved: "another scheduler continues the stream",
}
"""The messages for clients: an instance's own message may name addresses and tickets, and is only logged.

A failed hand-off between workers of other engines keeps its message: the scheduler wrote it, without addresses.
"""


def full_or(decode: Instance, error: PdserveError) -> PdserveError:
    """Return NoCapacity if a decode worker of another engine was late because it is full, else `error`.

    Such a worker queues a prompt for which it has no slot or no blocks, and generates for other prompts meanwhile.
    """
    load = decode.load
    if decode.description.worker is None or not (load.running and load.waiting and decode.stepped_within(_STEPPED_S)):
        return error
    decode.in_flight.refused()
    return NoCapacity(f"{error}: {decode} is full (sequences running: {load.running}, waiting: {load.waiting})")


def to_error(failure: Refused | Failed | SessionLost, instance: Instance, prompt: PromptRun) -> PdserveError:
    """Return the error to raise; if the instance reported that it is full, assign it nothing more for now."""
    if isinstance(failure, SessionLost):
        return failure.error
    error = from_name(failure.error, failure.message, failure.param if isinstance(failure, Refused) else "")
    if isinstance(error, NoCapacity):
        instance.in_flight.refused()
    if isinstance(error, InvalidRequest):
        return error
    report = _log.debug if isinstance(error, NoCapacity) else _log.warning  # a full pool refuses often; it is retried
    report(
        "prompt_failed_on_instance", request_id=prompt.request.request_id, prompt_id=failure.prompt_id,
        instance=instance, address=instance.address, error=failure.error, message=failure.message,
    )  # fmt: skip
    if isinstance(error, HandoffFailed) and instance.description.worker is not None:
        return HandoffFailed(f"{instance}: {failure.message}")
    return type(error)(f"{instance}: {_MESSAGES.get(type(error), 'it failed; the log has the reason')}")
