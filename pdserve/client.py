"""A small HTTP client for pdserve's commands: standard library only, no proxies."""

import http.client
import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from wire.errors import Unavailable

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body parsed as JSON, or None when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a Prometheus metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


def own_key(environ: Mapping[str, str]) -> str | None:
    """Return the API key that commands send: the first key of the first variable that is set."""
    for name in ("PDSERVE_API_KEY", "VLLM_API_KEY"):
        keys = environ.get(name, "").split()
        if keys:
            return keys[0]
    return None


def trusting(certfile: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts `certfile` alone, under any host name, or for None the system's authorities."""
    context = ssl.create_default_context(cafile=certfile)
    if certfile is not None:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Client:
    """HTTP client of one base URL; each call opens its own connection, sends the API key and has a timeout."""

    def __init__(self, base_url: str, *, timeout_s: float = 10.0, api_key: str | None = None) -> None:
        """`api_key` defaults to the environment's, read at each call."""
        parts = urlsplit(base_url)
        self._is_https = parts.scheme == "https"
        self.base_url = base_url.rstrip("/")
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._is_https else 80)
        self._timeout_s = timeout_s
        self._api_key = api_key

    def get(self, path: str) -> Reply:
        """Send a GET. Raises Unavailable when there is no response."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send a POST with a JSON body. Raises Unavailable when there is no response."""
        return self._request("POST", path, body)

    def metrics(self) -> tuple[Sample, ...]:
        """Return the samples of /metrics."""
        return parse_metrics(self.get("/metrics").body.decode())

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response. Raises Unavailable with the server's error message."""
        connection = self._connect()
        try:
            connection.connect()
        except OSError as error:
            raise self._no_answer_error(error) from error
        try:
            with self._send(connection, "POST", path, {**body, "stream": True}) as response:
                if response.status != 200:
                    raise Unavailable(f"HTTP {response.status}: {_message(response.read())}")
                for line in response:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise Unavailable(_message(line[5:]))
                        yield event
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the connection to {self.base_url} failed: {error}") from error
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Reply:
        connection = self._connect()
        try:
            response = self._send(connection, method, path, body)
            return Reply(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer_error(error) from error
        finally:
            connection.close()

    def _no_answer_error(self, error: OSError | http.client.HTTPException) -> Unavailable:
        return Unavailable(f"{self.base_url} does not answer: {getattr(error, 'strerror', None) or error}")

    def _connect(self) -> http.client.HTTPConnection:
        if not self._is_https:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        context = trusting(os.environ.get("PDSERVE_CERT_FILE"))
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content else {}
        if (key := self._api_key or own_key(os.environ)) is not None and key.isascii():
            headers["Authorization"] = f"Bearer {key}"
        connection.request(method, path, content, headers)
        return connection.getresponse()


def parse_metrics(text: str) -> tuple[Sample, ...]:
    """Return the samples of a page in Prometheus' text format; comments are skipped."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            samples.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return tuple(samples)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "no message"
