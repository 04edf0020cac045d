"""`pdserve.launch` of a scheduler that sends no probes: all its requests are those of a test. Run as a program."""

import sys
from dataclasses import dataclass

import scheduler.limits
from scheduler.limits import ControlLimits


@dataclass(frozen=True, slots=True)
class NoProbes(ControlLimits):
    """A pair is ready before it was used."""

    probe_after_s: float = float("inf")
    ready_window_s: float = float("inf")


def main() -> int:
    """Set the limits before anything of the product has read them, and start."""
    scheduler.limits.ControlLimits = NoProbes  # type: ignore[misc]
    from pdserve import launch

    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
