"""One prompt on one instance, and what the instance sends about it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from wire.errors import InstanceLost
from wire.messages import Answer, Cancel, Command, PrefillBegun, Reserved
from wire.types import PromptLogprobs, StageTimes, TokenOutput


@dataclass(slots=True)  # not frozen, for the reason given at TokenLogprobs
class PromptStep:
    """One prompt's part of a Step."""

    prompt_id: str
    tokens: list[TokenOutput]
    times: StageTimes | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session with the instance is over."""

    error: InstanceLost


PromptEvent = Answer | SessionLost


class PromptOwner(Protocol):
    """Receives what an instance sends about a prompt; scheduler/prompt_run.py implements it."""

    def on_step(self, on_instance: "PromptOnInstance", step: PromptStep) -> None:
        """Take a step. Never raises: the caller is the session shared by all prompts of an instance."""
        ...

    def on_event(self, on_instance: "PromptOnInstance", event: PromptEvent) -> None:
        """Take any other event. Never raises."""
        ...


class PromptOnInstance(AbstractContextManager["PromptOnInstance"]):
    """One prompt on one instance; `close` is called at the end of its `with` block.

    `started`: the instance has sent a token. `ended`: it has reported, or implied, that it keeps nothing of the prompt.
    Steps go to the `owner` directly. `short_of_blocks`: prompts, perhaps this one, wait for KV blocks on the instance.
    Unless it `generates`, it sends only the first tokens, and only the whole prompt can be cancelled. `owner_epoch` is
    the epoch under which a stream is cancelled.
    """

    def __init__(
        self, prompt_id: str, owner: PromptOwner, post: Callable[[Command], None],
        short_of_blocks: Callable[[], bool] = lambda: False, *, generates: bool = True,
        close: Callable[["PromptOnInstance"], None] = lambda closed: None, owner_epoch: int = 0,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.short_of_blocks = short_of_blocks
        self.started = self.ended = False
        self.on_start: Callable[[], None] = _nothing
        self.prompt_id = prompt_id
        self._post = post
        self.generates = generates
        self._close = close
        self._owner_epoch = owner_epoch

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self._close(self)

    def post(self, command: Command) -> None:
        """Send a command; does nothing once the session has ended (the owner has got `SessionLost`)."""
        self._post(command)

    def cancel(self) -> None:
        """Cancel the prompt on the instance, unless it has ended."""
        if not self.ended:
            self.release()

    def release(self) -> None:
        """Cancel the prompt on the instance, and release what is kept of a stream that has ended."""
        self._post(Cancel(self.prompt_id, owner_epoch=self._owner_epoch))

    def cancel_sequence(self, sequence: int) -> None:
        """Cancel one sequence on the instance, if it is generating."""
        if self.generates and self.started and not self.ended:
            self._post(Cancel(self.prompt_id, sequence, owner_epoch=self._owner_epoch))

    def on_event(self, event: PromptEvent) -> None:
        """Pass any event but a step to the owner."""
        self.ended |= not isinstance(event, Reserved | PrefillBegun)
        self.owner.on_event(self, event)


def _nothing() -> None:
    """Do nothing at the first token."""
