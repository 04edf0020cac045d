"""Send requests to one route of a server and record the time of each piece of the response."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from pdserve.bench.load.dialect import ApiDialect, error_message, read_piece, read_whole
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.sse import EventReader
from pdserve.bench.load.timeline import RequestFailure, Timeline
from remote_files.os_errors import system_message

NO_CONNECTION = "no connection"
"""The kind of failure if nothing listens."""
_MAX_ERROR_BYTES = 64 << 10  # bytes read of an error response


class _Failed(Exception):
    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.failure = RequestFailure(kind, message)


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Sends requests in one dialect to one base URL; `clock` returns seconds."""

    http: aiohttp.ClientSession
    base_url: str
    dialect: ApiDialect
    clock: Callable[[], float] = time.perf_counter

    async def send(
        self, request: LoadRequest, due_s: float | None = None, *, more: Mapping[str, Any] | None = None,
        on_first: Callable[[], None] = _do_nothing,
    ) -> Timeline:  # fmt: skip
        """Return the request's timeline; a failure is part of it, not raised. `more` is added to the body."""
        sent_s = self.clock()
        answer = _Answer(self.clock, on_first)
        body = orjson.dumps({**self.dialect.body(request), **(more or {})})
        try:
            await self._receive(body, answer)
            failure = answer.lacking()
        except _Failed as error:
            failure = error.failure
        except aiohttp.ClientConnectorError as error:
            failure = RequestFailure(NO_CONNECTION, system_message(error.os_error))
        except TimeoutError:
            failure = RequestFailure("deadline", f"no complete answer within {self.http.timeout.total or 0:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            failure = RequestFailure("broke off", str(error) or type(error).__name__)
        except ValueError as error:
            failure = RequestFailure("no event", str(error)[:300])
        line = answer.timeline(sent_s if due_s is None else due_s, sent_s)
        return line if failure is None else replace(line, failure=failure, end_s=self.clock())

    async def _receive(self, body: bytes, answer: "_Answer") -> None:
        headers = {"Content-Type": "application/json"}
        async with self.http.post(self.base_url + self.dialect.path, data=body, headers=headers) as response:
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}", _error_text(await response.content.read(_MAX_ERROR_BYTES)))
            if not self.dialect.is_streamed:
                answer.take_whole(await response.read())
                return
            reader = EventReader()
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    answer.take(data)


class _Answer:
    """The response received so far."""

    def __init__(self, clock: Callable[[], float], on_first: Callable[[], None]) -> None:
        self._clock, self._on_first = clock, on_first
        self._pieces_s: list[float] = []
        self._texts: list[str] = []
        self._end_s: float | None = None
        self._has_pieces = True
        self._usage: tuple[int, int] | None = None
        self._finished = self._done = False

    def take(self, data: bytes) -> None:
        """Record one event. Raises _Failed for an error, ValueError for an invalid event."""
        now = self._clock()
        if data == b"[DONE]":
            self._done = True
            return
        piece = read_piece(orjson.loads(data))
        if piece.error is not None:
            raise _Failed("error in the stream", piece.error)
        self._usage = piece.usage or self._usage
        if piece.is_output:
            if not self._pieces_s:
                self._on_first()
            self._pieces_s.append(now)
            self._texts.append(piece.text)
        if piece.is_output or piece.finish is not None:
            self._end_s = now
        self._finished = self._finished or piece.finish is not None

    def take_whole(self, data: bytes) -> None:
        """Record a response that is not streamed: it has an end and no pieces. Raises ValueError."""
        piece = read_whole(orjson.loads(data))
        self._usage, self._end_s, self._finished, self._has_pieces = piece.usage, self._clock(), True, False

    def lacking(self) -> RequestFailure | None:
        """Return the failure of an incomplete response, None for a complete one."""
        if not self._finished:
            return RequestFailure("broke off", "the stream ended without a finish_reason")
        if self._usage is None:
            cause = " despite stream_options.include_usage" if self._done else ""
            is_whole = self._done or not self._has_pieces
            message = f"the server sent no token counts{cause}"
            return RequestFailure("no usage", message if is_whole else "the stream ended before the usage")
        return None

    def timeline(self, due_s: float, sent_s: float) -> Timeline:
        """Return the timeline so far; a response without text pieces has its end as its only piece."""
        end_s = sent_s if self._end_s is None else self._end_s
        pieces = tuple(self._pieces_s)
        if self._finished and self._has_pieces and not pieces:
            pieces = (end_s,)
        prompt, output = self._usage or (0, 0)
        return Timeline(due_s, sent_s, pieces, end_s, prompt, output, "".join(self._texts))


def _error_text(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return " ".join(body.decode(errors="replace").split())[:300]
