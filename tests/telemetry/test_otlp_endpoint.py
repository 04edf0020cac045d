"""Which collector a URL and OpenTelemetry's environment variables select."""

import sys

import pytest

from telemetry.otlp_endpoint import is_installed, read_endpoint


@pytest.mark.parametrize(
    ("url", "environ", "shown"),
    [
        ("http://collector:4317", {}, "grpc://collector:4317"),
        ("grpc://collector", {}, "grpc://collector:4317"),
        ("collector:9999", {}, "grpc://collector:9999"),
        ("https://collector", {}, "grpcs://collector:4317"),
        ("http://collector:4318", {}, "http://collector:4318/v1/traces"),
        ("http://collector:80/v1/traces", {}, "http://collector:80/v1/traces"),
        ("https://collector/otlp/v1/traces", {}, "https://collector:4318/otlp/v1/traces"),
        ("http://[::1]:4317", {}, "grpc://::1:4317"),
        ("http://c:9999", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://c:9999/v1/traces"),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc://c:4318"),
        (
            "http://c:4318",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "grpc://c:4318",
        ),
    ],
)
def test_a_url_is_a_collector(url: str, environ: dict[str, str], shown: str) -> None:
    assert str(read_endpoint(url, environ)) == shown


@pytest.mark.parametrize("url", ["", "http://", "ftp://c:1", "http://c:99999"])
def test_an_invalid_collector_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a collector's URL"):
        read_endpoint(url, {})


@pytest.mark.parametrize(
    "url", ["http://user:ecret@c:4317", "http://:ecret@c:99999", "ftp://c?key=ecret", "c:4317/?ecret"]
)
def test_credentials_in_a_url_are_refused_and_not_printed(url: str) -> None:
    with pytest.raises(ValueError, match="a collector's URL must not have credentials or a query: use") as refused:
        read_endpoint(url, {})
    assert "ecret" not in str(refused.value)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="'http/json' is not one of grpc, http/protobuf"):
        read_endpoint("http://c:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_headers_are_read_and_never_printed() -> None:
    endpoint = read_endpoint("http://c:4318", {"OTEL_EXPORTER_OTLP_HEADERS": "api-key = s%20ecret ,X-Team=a"})

    assert endpoint.headers == (("api-key", "s ecret"), ("x-team", "a"))
    assert "ecret" not in repr(endpoint) + str(endpoint)


@pytest.mark.parametrize("headers", ["nothing", "a b=1", "key=line%0d%0aInjected: 1", "key=ü"])
def test_invalid_headers_are_refused_without_their_value(headers: str) -> None:
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        read_endpoint("http://c:4318", {"OTEL_EXPORTER_OTLP_HEADERS": headers})
    assert "Injected" not in str(refused.value)


def test_the_service_has_a_name() -> None:
    assert read_endpoint("http://c:4317", {}).service_name == "pdserve"
    assert read_endpoint("http://c:4317", {"OTEL_SERVICE_NAME": "chat"}).service_name == "chat"


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.proto"])
def test_missing_message_dependencies_are_reported(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    assert not is_installed()
