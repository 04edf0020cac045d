"""JSON that ranks send to rank 0: errors by class name, dataclasses by their fields, and invalid payloads."""

import json
from dataclasses import dataclass

import pytest

from processes.rank_payloads import from_json, pack_error, unpack_error
from wire.errors import ConfigError, HandoffFailed, InternalError


@dataclass
class Point:
    x: int
    y: int


def test_an_error_survives_the_round_trip_with_its_ranks_prefix() -> None:
    error = unpack_error(pack_error(ConfigError("too small")), "rank 1: ")

    assert (type(error), str(error)) == (ConfigError, "rank 1: too small")
    assert str(unpack_error(pack_error(HandoffFailed("why")))) == "why"
    assert pack_error(None) == b""
    assert unpack_error(b"") is None


def test_an_error_outside_our_tree_becomes_an_internal_error() -> None:
    error = unpack_error(pack_error(OSError("no memory")))

    assert (type(error), str(error)) == (InternalError, "no memory")


@pytest.mark.parametrize("payload", [b"\xff", b"[]", b"{}", b'{"error": "X"}'])
def test_an_invalid_error_payload_is_quoted(payload: bytes) -> None:
    assert str(unpack_error(payload)) == f"a rank failed and sent {payload!r}"
    assert str(unpack_error(payload, "rank 1: ")) == f"rank 1: failed and sent {payload!r}"


def test_an_object_must_have_exactly_the_fields_of_its_class() -> None:
    assert from_json(Point, b'{"x": 1, "y": 2}') == Point(1, 2)
    for other in ({"x": 1}, {"x": 1, "y": 2, "z": 3}, [1, 2]):
        with pytest.raises(ValueError, match="not a Point"):
            from_json(Point, json.dumps(other).encode())
