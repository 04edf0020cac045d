"""The interface between a file of requests and the backend that answers them.

BatchBackend, with two implementations here:
├── AppBackend (app_backend.py)    an ASGI app in this process
└── UrlBackend (url_backend.py)    a live server
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class BatchBackend(Protocol):
    """Answers HTTP requests, many at once."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Return the answer, whatever its status; a body is JSON unless `headers` say otherwise.

        A cancellation also cancels the request at the server. Raises Unavailable if no complete answer arrives.
        """
        ...
