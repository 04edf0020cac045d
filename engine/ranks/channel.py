"""What rank 0 and another rank say to each other over their channel (wire/rank_channel.py), by kind."""

from enum import IntEnum


class RankMessageKind(IntEnum):
    """What a message says. The first row goes to a rank, the second comes from it."""

    SETUP, POOL, CONNECT, STEP, COPY, SAVE, LOAD, HAND_OFF = range(1, 9)
    LOADED, MAPPED, READY, FAILED = range(11, 15)
