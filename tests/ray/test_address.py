"""Which values --address accepts."""

import pytest

from pdserve.ray_cluster.address import is_loopback, parse_address, split
from wire.errors import ConfigError


@pytest.mark.parametrize("text", ["auto", "127.0.0.1:6379", "10.0.0.18:6379", "head.example:1", "[fd00::1]:65535"])
def test_addresses_ray_accepts_are_accepted(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ray://10.0.0.18:10001", "Ray's client protocol is not supported"),
        ("10.0.0.18", "write HOST:PORT"),
        ("", "write HOST:PORT"),
        ("http://10.0.0.18:8265", "write HOST:PORT"),
        ("10.0.0.18:6379 --x", "write HOST:PORT"),
        ("10.0.0.18:0", "port 0 is not in 1..65535"),
        ("10.0.0.18:65536", "port 65536 is not in 1..65535"),
    ],
)
def test_anything_else_is_refused_with_the_value(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_address(text)

    assert text in str(refused.value)


def test_host_and_port_are_separated() -> None:
    assert split("[fd00::1]:6379") == ("fd00::1", 6379)
    assert split("10.0.0.18:6379") == ("10.0.0.18", 6379)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("h", False)],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
