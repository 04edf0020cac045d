"""Send a batch of spans to a collector by HTTP POST or gRPC call, with a deadline. Proxy settings are ignored."""

import contextlib
import http.client
import socket
from collections.abc import Callable
from typing import Protocol

import grpc

from telemetry.otlp_endpoint import OtlpEndpoint

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_MAX_ANSWER = 64 * 2**10
_HTTP_AGAIN = frozenset((429, 502, 503, 504))
_GRPC_AGAIN = frozenset((
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED,
))  # fmt: skip


class ExportFailed(Exception):
    """A collector did not accept a batch; `may_retry` if sending it again later may succeed."""

    def __init__(self, reason: str, *, may_retry: bool) -> None:
        super().__init__(reason)
        self.may_retry = may_retry


class OtlpTransport(Protocol):
    """Sends one request at a time."""

    def send(self, payload: bytes, timeout_s: float) -> bytes:
        """Return the collector's response. Raises ExportFailed."""
        ...

    def close(self) -> None:
        """Release its connection or channel."""
        ...


def open_transport(endpoint: OtlpEndpoint) -> OtlpTransport:
    """Return the transport for a collector; it connects when the first batch is sent."""
    return _Grpc(endpoint) if endpoint.is_grpc else _Http(endpoint)


class _Http:
    """Opens one connection per batch: the collector may be restarted between batches."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        self._endpoint = endpoint
        self._kind = http.client.HTTPSConnection if endpoint.is_tls else http.client.HTTPConnection
        self._socket: socket.socket | None = None

    def send(self, payload: bytes, timeout_s: float) -> bytes:
        """See OtlpTransport."""
        connection = self._kind(self._endpoint.host, self._endpoint.port, timeout=timeout_s)
        headers = {"content-type": "application/x-protobuf", **dict(self._endpoint.headers)}
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("POST", self._endpoint.path, payload, headers)
            answer = connection.getresponse()
            body = answer.read(_MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise ExportFailed(f"{type(error).__name__}: {error}", may_retry=True) from error
        finally:
            self._socket = None
            connection.close()
        if answer.status != 200:
            raise ExportFailed(f"status {answer.status}", may_retry=answer.status in _HTTP_AGAIN)
        return body

    def close(self) -> None:
        """See OtlpTransport. Called from another thread, it aborts a send in progress."""
        with contextlib.suppress(OSError):
            if (in_use := self._socket) is not None:
                in_use.shutdown(socket.SHUT_RDWR)


class _Grpc:
    """One channel, which reconnects automatically."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        target, options = f"{endpoint.host}:{endpoint.port}", [("grpc.enable_http_proxy", 0)]
        if ":" in endpoint.host:
            target = f"[{endpoint.host}]:{endpoint.port}"
        self._channel = (
            grpc.secure_channel(target, grpc.ssl_channel_credentials(), options)
            if endpoint.is_tls
            else grpc.insecure_channel(target, options)
        )
        self._export: Callable[..., bytes] = self._channel.unary_unary(_METHOD)
        self._headers = endpoint.headers

    def send(self, payload: bytes, timeout_s: float) -> bytes:
        """See OtlpTransport."""
        try:
            return self._export(payload, timeout=timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            raise ExportFailed(f"gRPC status {code.name}", may_retry=code in _GRPC_AGAIN) from error

    def close(self) -> None:
        """See OtlpTransport."""
        self._channel.close()
