"""Where an instance sends the events of a prompt: to the session of the scheduler that owns it."""

from typing import Protocol

from wire.messages import Event


class EventSink(Protocol):
    """The owner of prompts. Only it may cancel them, and they end with it, except streams (wire/kept_stream.py)."""

    @property
    def ended(self) -> bool:
        """Whether its session is over: its events are dropped, and its streams wait to be adopted."""
        ...

    def emit(self, event: Event) -> None:
        """Queue an event for the scheduler. Any thread; order is kept per thread."""
        ...
