"""Choose the backend of a batch: the server at --base-url, else a model loaded into this process."""

import argparse
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from batch.app_backend import AppBackend
from batch.backend import NO_HEADERS, Answer, BatchBackend
from batch.url_backend import UrlBackend
from flags.options import EngineOptions, from_namespace
from pdserve.batch_run.request import BatchRequest
from pdserve.up_request import fill_model
from scheduler.config import SchedulerConfig
from wire.errors import ConfigError, Unavailable

_TEMPORARY = (408, 425, 429)  # transient statuses below 500


class NoBackend:
    """The BatchBackend of a batch whose lines are all answered already; it is never called."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Raises Unavailable."""
        raise Unavailable(f"{method} {path}: this batch has no backend")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that this process loads; its files are on this machine."""

    config: SchedulerConfig

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[BatchBackend]:
        """Load the model; it is ready when entered. Raises ConfigError."""
        from pdserve.inner_app import inner_app

        async with inner_app(self.config.engine, self.config.options) as app:
            yield AppBackend(app)


@dataclass(frozen=True, slots=True)
class BatchServer:
    """The server at --base-url; `names` are models that it must serve."""

    backend: UrlBackend
    names: tuple[str, ...]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[BatchBackend]:
        """Open the connections. Raises ConfigError if the server lacks a model, Unavailable if it does not answer."""
        async with self.backend as backend:
            self._check(await backend.send("GET", "/v1/models"))  # report a wrong URL at once
            yield backend

    def _check(self, answer: Answer) -> None:
        shown = self.backend.shown
        if answer.status == 401:
            raise ConfigError(f"{shown} requires a valid API key: set --api-key or PDSERVE_API_KEY")
        served = _served_models(answer)
        if served is None:
            problem = f"{shown} answers GET /v1/models with status {answer.status} and no list of models"
            if answer.status >= 500 or answer.status in _TEMPORARY:
                raise Unavailable(problem)
            raise ConfigError(
                f"{problem}: --base-url must be the URL of an OpenAI-compatible server, such as http://HOST:PORT"
            )
        for name in self.names:
            if name not in served:
                has = ", ".join(served) or "no model"
                raise ConfigError(f"the model {name} is not served at {shown}, which has {has}")


async def check_models(backend: BatchBackend, models: Collection[str], place: Path) -> None:
    """Raise ConfigError if `place` has answers of a model not served now: another model would answer the rest."""
    if models:
        served = _served_models(await backend.send("GET", "/v1/models")) or []
        for name in sorted(set(models) - set(served)):
            rest = f"the failed lines would be answered by {', '.join(served) or '(none)'}"
            raise ConfigError(f"{place} has good answers of the model {name}, but {rest}: serve the same model")


def local_model(request: BatchRequest) -> LocalModel:
    """Prepare the model's files. Raises ConfigError."""
    namespace = argparse.Namespace(**vars(request.namespace))
    fill_model(namespace)
    return LocalModel(SchedulerConfig(from_namespace(EngineOptions, namespace), request.scheduler))


def server(request: BatchRequest) -> BatchServer:
    """Return the server at --base-url. Raises ConfigError for an invalid URL or key."""
    assert request.options.base_url is not None
    backend = UrlBackend(
        request.options.base_url, request.api_key, connections=request.max_inflight, timeout_s=request.request_timeout_s
    )
    engine = request.engine
    names = (engine.model, *engine.served_model_name) if "model" in request.typed else engine.served_model_name
    return BatchServer(backend, tuple(name for name in names if name))


def _served_models(answer: Answer) -> list[str] | None:
    try:
        body: Any = orjson.loads(answer.body)
        return [str(card["id"]) for card in body["data"]]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
