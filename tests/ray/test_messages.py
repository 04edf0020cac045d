"""Messages cross as JSON and are checked on arrival."""

import pytest

from pdserve.ray_cluster.messages import (
    LaunchRequest,
    NodeRequest,
    Placement,
    PollReply,
    PollRequest,
    RemoteFailure,
    decode,
    encode,
)
from wire.errors import InternalError

_MESSAGES = [
    NodeRequest("npu", ("4", "5"), "0.1.0"),
    Placement("n", "10.0.0.1", 20000, ("4",), ("10.1.0.1",)),
    LaunchRequest("decode-0", "decode", ("--model", "m"), "g.json", "{}", "l.json", "{}", "s", "/w"),
    PollRequest(0, None), PollRequest(9, "{}"), PollReply(7, "said\n", 5, False, None),
    PollReply(7, "", 5, True, -9), RemoteFailure("X", "y"),
]  # fmt: skip


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    assert decode(type(message), encode(message)) == message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "PollRequest: not JSON"),
        ("[]", "PollRequest has list"),
        ('{"offset": 0}', r"PollRequest has \['offset'\], expected \['global_table', 'offset'\]"),
        ('{"offset": 0, "global_table": null, "x": 1}', "PollRequest has"),
        ('{"offset": "0", "global_table": null}', "PollRequest.offset is '0'"),
        ('{"offset": 0, "global_table": 1}', "PollRequest.global_table is 1"),
    ],
)
def test_invalid_messages_are_refused(text: str, words: str) -> None:
    with pytest.raises(InternalError, match=words):
        decode(PollRequest, text)


def test_a_list_of_anything_but_strings_is_refused() -> None:
    with pytest.raises(InternalError, match=r"NodeRequest.device_ids is \[4\]"):
        decode(NodeRequest, '{"kind": "npu", "device_ids": [4], "version": "0"}')
