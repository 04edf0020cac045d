"""The kinds of messages between rank 0 and another rank on their channel (processes/rank_channel.py)."""

from enum import IntEnum


class RankMessageKind(IntEnum):
    """Kind of message. Rank 0 sends those of the first row, the other rank those of the second."""

    SETUP, POOL, CONNECT, STEP, COPY, SAVE, LOAD, HAND_OFF, CAPTURE, DROP = range(1, 11)
    LOADED, MAPPED, READY, FAILED, CAPTURED = range(11, 16)
