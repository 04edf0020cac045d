"""The counters of a receiver, which instances report to the scheduler with their load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReceiverCounts:
    """A receiver's counters since it started."""

    bytes_received: int = 0
    duplicate_frames: int = 0
    dropped_frames: int = 0
    corrupt_frames: int = 0
    refused_connections: int = 0
    renewals: int = 0
