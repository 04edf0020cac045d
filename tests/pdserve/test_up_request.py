"""What `up` was given reaches its instances as the flags they know."""

import argparse

import pytest

from pdserve.up_request import to_flags
from wire.options import EngineOptions, Parser, add_flags, from_namespace


@pytest.mark.parametrize(
    "typed",
    [
        ["--no-kv-digests"],
        ["--kv-digests", "--kv-links", "3"],
        ["--kv-transport", "tcp", "shm", "--kv-cache-memory", "1048576", "--block-size", "32"],
    ],
)
def test_flags_say_the_same_again(typed: list[str]) -> None:
    parser: argparse.ArgumentParser = Parser()
    add_flags(parser, EngineOptions, "engine")
    namespace = parser.parse_args(typed)

    again = parser.parse_args(to_flags(namespace))

    assert from_namespace(EngineOptions, again) == from_namespace(EngineOptions, namespace)
