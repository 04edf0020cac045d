"""What is stored of a response, and the interface of the store."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: `response` is the object that clients get, `items` the conversation that it answers, both as JSON.

    `owner` is the tenant of the API key that created it, empty without keys. `done`: it has its final status. `events`
    are those of its stream, if clients may read it again.
    """

    response_id: str
    owner: str
    background: bool
    response: bytes
    items: bytes
    done: bool = False
    events: bytes = b""


class ResponseStore(Protocol):
    """Keeps responses for their owners. scheduler/responses_store/sqlite_store.py implements it.

    Each method raises Unavailable if the store fails, and DeadlineExceeded if it does not answer in time. `add`,
    `find` and `delete` also raise Overloaded if too many calls wait.
    """

    def new_id(self) -> str:
        """Return the id of a new response; it names this store."""
        ...

    def is_foreign(self, response_id: str) -> bool:
        """Whether an id names another store, be it another scheduler's or one that is gone."""
        ...

    async def add(self, stored: StoredResponse) -> None:
        """Keep a response that is not done. Raises InvalidRequest if it alone exceeds the store's bytes."""
        ...

    async def finish(self, response_id: str, response: bytes | None, events: bytes = b"") -> bool:
        """Store the final object of a response, which is then done; None: drop the response.

        Return whether it is stored: not if it was deleted before, or if it exceeds the store's bytes.
        """
        ...

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response of this owner; None if there is none, be it deleted, expired or someone else's."""
        ...

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response of this owner; return whether there was one."""
        ...

    async def close(self) -> None:
        """Complete the waiting calls and close the store."""
        ...
