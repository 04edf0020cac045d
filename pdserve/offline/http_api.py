"""LLM's HTTP client: JSON requests and responses, retries for a busy server, errors of the product's error tree."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from batch.backend import Answer, BatchBackend
from remote_files.retry_after import retry_after_s
from wire.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
    UnknownModel,
)

_CARD = {"id", "root", "max_model_len"}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0
_TEMPORARY = (Overloaded, Unavailable, DeadlineExceeded)  # DeadlineExceeded: the request waited too long in the queue
_ERRORS: Mapping[int, type[PdserveError]] = {
    401: ConfigError, 403: ConfigError, 404: UnknownModel, 429: Overloaded, 503: Unavailable, 504: DeadlineExceeded,
}  # fmt: skip


class HttpApi:
    """A client of one model of a server. `retry_for_s` may be changed for later requests."""

    def __init__(
        self, backend: BatchBackend, *, retry_for_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`retry_for_s`: how long to retry while the server is busy or cannot be reached."""
        self._backend = backend
        self.retry_for_s = retry_for_s
        self._sleep = sleep
        self.model = ""
        self.root = ""
        self.max_model_len = 0

    async def choose(self, model: str) -> None:
        """Select the model of this name, or the first if no name is given. Raises ConfigError if it is not served."""
        cards = await self._model_cards()
        try:
            card = await self.get_json(f"/v1/models/{quote(model, safe='/')}") if model else cards[0]
        except UnknownModel:
            names = ", ".join(repr(one["id"]) for one in cards)
            raise ConfigError(f"the model {model!r} is not served, only {names}") from None
        self.model, self.root, self.max_model_len = card["id"], card["root"], card["max_model_len"]

    async def _model_cards(self) -> list[Any]:
        """Return the entries of /v1/models, at least one. Raises ConfigError if they lack pdserve's fields."""
        try:
            cards: list[Any] = (await self.get_json("/v1/models"))["data"]
            if cards and all(one.keys() >= _CARD for one in cards):
                return cards
        except ConfigError as refused:
            raise ConfigError(f"{refused} (LLM(api_key=...), or PDSERVE_API_KEY)") from None
        except (UnknownModel, InvalidRequest, ValueError, KeyError, TypeError, AttributeError):
            pass  # not a model server
        raise ConfigError(
            "GET /v1/models lists no model with root and max_model_len: cluster must be the URL of a pdserve "
            "scheduler, such as http://HOST:9000"
        )

    async def get_json(self, path: str) -> Any:
        """Return the JSON of a GET."""
        return orjson.loads((await self._send("GET", path, b"")).body)

    async def get_text(self, path: str) -> str:
        """Return the text of a GET."""
        return (await self._send("GET", path, b"")).body.decode()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post a body for the selected model and return the JSON response.

        Raises InvalidRequest if it is refused, and the server's errors.
        """
        return orjson.loads((await self.post_whole(path, body)).body)

    async def post_whole(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Post a body and return the response with its headers. Raises what `post` raises."""
        return await self._send("POST", path, orjson.dumps({"model": self.model, **body}))

    async def _send(self, method: str, path: str, body: bytes) -> Answer:
        clock, failed_s, wait_s = asyncio.get_running_loop().time, None, _FIRST_WAIT_S
        while True:
            requested_s = 0.0
            try:
                answer = await self._backend.send(method, path, body)
                if answer.status == 200:
                    return answer
                requested_s, error = retry_after_s(answer.headers.get("retry-after", "")), error_of(answer)
            except Unavailable as gone:
                error = gone
            failed_s = clock() if failed_s is None else failed_s
            if not isinstance(error, _TEMPORARY) or clock() + wait_s > failed_s + self.retry_for_s:
                raise error
            await self._sleep(max(min(requested_s, _LONGEST_WAIT_S), random.uniform(wait_s / 2, wait_s)))  # noqa: S311 - no secret
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def error_of(answer: Answer) -> PdserveError:
    """Convert an error response to an exception."""
    try:
        message = str(orjson.loads(answer.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.body[:200].decode(errors="replace")
    if (kind := _ERRORS.get(answer.status)) is not None:
        return kind(message)
    if 400 <= answer.status < 500:
        return InvalidRequest(message)
    return InternalError(f"HTTP {answer.status}: {message}")
