"""The messages between a serving process and the process of one link's group (processes/rank_channel.py).

serving process  MAKE setup, fds of the staging    SEND start, bytes    RECEIVE start, bytes    ARRIVED message
group's process  DONE | FAILED text, one for each of the first three, in their order
                 FORWARD message: a set-up message for the peer    NEXT: a request for the peer's next message
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

PLACE = struct.Struct("!QQ")
"""A part of the staging: start, bytes."""


class GroupMessage(IntEnum):
    """The kind of a message."""

    MAKE, SEND, RECEIVE, ARRIVED = range(1, 5)
    DONE, FAILED, FORWARD, NEXT = range(11, 15)


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """What a group is made of: see Collective.make. The staging has `num_bytes` of memory on `staging_device`."""

    name: str
    collective: str
    device: str
    rank: int
    host: str
    timeout_s: float
    staging_device: str
    num_bytes: int
    handle: str
