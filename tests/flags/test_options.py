"""Flags are read from one dataclass."""

import pytest

from flags.options import EngineOptions, Parser, add_flags, from_namespace, parse_bytes
from wire.errors import ConfigError


def read(*argv: str) -> EngineOptions:
    parser = Parser(prog="x", allow_abbrev=False)
    add_flags(parser, EngineOptions, "engine")
    return from_namespace(EngineOptions, parser.parse_args(list(argv)))


def test_a_flag_value_may_follow_a_space_or_an_equals_sign() -> None:
    options = read("--model=m", "--port", "8088", "--served-model-name", "a,b", "c", "--kv-cache-memory=512MiB")

    assert (options.model, options.port, options.kv_cache_memory) == ("m", 8088, 512 * 2**20)
    assert options.served_names() == ("a", "b", "c", "m")


def test_an_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--modle: did you mean --model"):
        read("--modle", "x")


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("1GiB", 2**30), ("2 GB", 2 * 10**9), ("1.5MiB", 3 * 2**19)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_an_invalid_size_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match="'lots'"):
        parse_bytes("lots")


def test_an_invalid_value_is_refused_with_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory: 'lots' is not a size"):
        read("--kv-cache-memory", "lots")
    with pytest.raises(ConfigError, match=r"--port: invalid int value: 'abc'"):
        read("--port", "abc")
