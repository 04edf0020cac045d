"""`pdserve.launch` with a test's timeouts: what takes 10 s in service takes 2 or 3 here. Run as a program."""

import sys
from dataclasses import dataclass

import instance.config
import instance.host
import scheduler.limits
from instance.config import InstanceConfig
from scheduler.limits import ControlLimits

LEASE_S = 3.0
SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class ShortLimits(ControlLimits):
    """The scheduler's. No probes: each hit of a failpoint is by a request of the test."""

    heartbeat_s: float = 0.2
    silence_s: float = SILENCE_S
    progress_s: float = LEASE_S
    lease_s: float = LEASE_S
    describe_s: float = 1.0
    open_s: float = 1.0
    send_s: float = SILENCE_S
    backoff_first_s: float = 0.05
    backoff_most_s: float = 0.1
    backoff_young_s: float = 0.1
    reserve_s: float = 3.0
    settle_s: float = 1.0
    probe_after_s: float = float("inf")
    ready_window_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class ShortConfig(InstanceConfig):
    """An instance's."""

    ticket_lease_s: float = LEASE_S


def main() -> int:
    """Set the short timeouts before anything of the product has read the long ones, and start."""
    scheduler.limits.ControlLimits = ShortLimits  # type: ignore[misc]
    instance.config.InstanceConfig = ShortConfig  # type: ignore[misc]
    instance.host.HEARTBEAT_S = 0.2
    from pdserve import launch

    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
