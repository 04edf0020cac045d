"""Messages cross as JSON and are checked on arrival."""

import pytest

from pdserve.ray_cluster.messages import Look, News, NodeRequest, Orders, RemoteFailure, Seat, decode, encode
from wire.errors import InternalError

_MESSAGES = [
    NodeRequest("npu", ("4", "5"), "0.1.0"),
    Seat("n", "10.0.0.1", 20000, ("4",), ("10.1.0.1",)),
    Orders("decode-0", "decode", ("--model", "m"), "g.json", "{}", "l.json", "{}", "s", "/w"),
    Look(0, None), Look(9, "{}"), News(7, "said\n", 5, False, None), News(7, "", 5, True, -9), RemoteFailure("X", "y"),
]  # fmt: skip


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    assert decode(type(message), encode(message)) == message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Look: not JSON"),
        ("[]", "Look has list"),
        ('{"offset": 0}', r"Look has \['offset'\], expected \['global_table', 'offset'\]"),
        ('{"offset": 0, "global_table": null, "x": 1}', "Look has"),
        ('{"offset": "0", "global_table": null}', "Look.offset is '0'"),
        ('{"offset": 0, "global_table": 1}', "Look.global_table is 1"),
    ],
)
def test_invalid_messages_are_refused(text: str, words: str) -> None:
    with pytest.raises(InternalError, match=words):
        decode(Look, text)


def test_a_list_of_anything_but_strings_is_refused() -> None:
    with pytest.raises(InternalError, match=r"NodeRequest.device_ids is \[4\]"):
        decode(NodeRequest, '{"kind": "npu", "device_ids": [4], "version": "0"}')
