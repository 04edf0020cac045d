"""What an instance's bad ending of a prompt means to the request."""

from scheduler.inbox import Lost
from scheduler.instances import Instance
from wire.errors import NoCapacity, PdserveError, from_name
from wire.messages import Failed, Refused


def to_error(ending: Refused | Failed | Lost, instance: Instance) -> PdserveError:
    """Return the error to raise, and close the instance to new prompts if it said it is full."""
    if isinstance(ending, Lost):
        return ending.error
    error = from_name(ending.error, f"{instance}: {ending.message}")
    if isinstance(error, NoCapacity):
        instance.books.refused()
    return error
