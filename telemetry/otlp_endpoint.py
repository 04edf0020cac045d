"""The OTLP collector that spans are exported to, from its URL and OpenTelemetry's environment variables, read once."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_PATH = "/v1/traces"
_HTTP_PORT, _GRPC_PORT = 4318, 4317
_SCHEMES = ("http", "https", "grpc", "grpcs")
_PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A collector. `headers` may contain API keys and are left out of `repr`."""

    host: str
    port: int
    path: str
    is_tls: bool
    is_grpc: bool
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    service_name: str = "pdserve"

    def __str__(self) -> str:
        """Return its address, for the log."""
        kind = ("grpc" if self.is_grpc else "http") + ("s" if self.is_tls else "")
        return f"{kind}://{self.host}:{self.port}{self.path}"


def read_endpoint(url: str, environ: Mapping[str, str]) -> OtlpEndpoint:
    """Return the collector at `url`: gRPC by default, as in vLLM; HTTP if the path or the port is that of OTLP/HTTP.

    Reads OTEL_EXPORTER_OTLP_[TRACES_]PROTOCOL, _HEADERS and OTEL_SERVICE_NAME. Raises ValueError for an invalid URL,
    protocol or header.
    """
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    if parts.username or parts.password or parts.query:
        raise ValueError("a collector's URL must not have credentials or a query: use OTEL_EXPORTER_OTLP_HEADERS")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a collector's URL: {error}") from None
    if parts.scheme not in _SCHEMES or not host:
        raise ValueError(f"{url!r} is not a collector's URL: write http://HOST:4317 or http://HOST:4318/v1/traces")
    is_grpc = _is_grpc(parts.scheme, parts.path, port, environ)
    return OtlpEndpoint(
        host, port or (_GRPC_PORT if is_grpc else _HTTP_PORT),
        "" if is_grpc else _PATH if parts.path in ("", "/") else parts.path,
        is_tls=parts.scheme in ("https", "grpcs"), is_grpc=is_grpc,
        headers=tuple(_headers(_read_variable("HEADERS", environ))),
        service_name=environ.get("OTEL_SERVICE_NAME") or "pdserve",
    )  # fmt: skip


def is_installed() -> bool:
    """Return whether opentelemetry-proto, which defines OTLP's messages, is installed."""
    try:
        return importlib.util.find_spec("opentelemetry.proto.collector.trace.v1") is not None
    except ModuleNotFoundError:
        return False


def _is_grpc(scheme: str, path: str, port: int | None, environ: Mapping[str, str]) -> bool:
    named = _read_variable("PROTOCOL", environ)
    if named and named not in _PROTOCOLS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL {named!r} is not one of {', '.join(_PROTOCOLS)}")
    if named and not scheme.startswith("grpc"):
        return named == "grpc"
    return scheme.startswith("grpc") or (path in ("", "/") and port != _HTTP_PORT)


def _headers(text: str) -> Iterator[tuple[str, str]]:
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        name, value = name.strip().lower(), unquote(value.strip())
        if not equals or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"OTEL_EXPORTER_OTLP_HEADERS: header {name[:40]!r} is not NAME=VALUE")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"OTEL_EXPORTER_OTLP_HEADERS: the value of {name[:40]!r} is not printable ASCII")
        yield name, value


def _read_variable(name: str, environ: Mapping[str, str]) -> str:
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""
