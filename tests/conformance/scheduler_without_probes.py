"""`pdserve.launch` of a scheduler that sends no probes, and of equal instances takes the first. Run as a program."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import scheduler.limits
from scheduler.limits import ControlLimits


@dataclass(frozen=True, slots=True)
class NoProbes(ControlLimits):
    """A pair is ready before it was used."""

    probe_after_s: float = float("inf")
    ready_window_s: float = float("inf")


def main() -> int:
    """Set the limits before anything of the product has read them, and the source of chance, and start."""
    scheduler.limits.ControlLimits = NoProbes  # type: ignore[misc]
    from pdserve import launch
    from scheduler import serving
    from testing.scheduler.first_of_ties import FirstOfTies

    serving.__dict__["random"] = SimpleNamespace(Random=FirstOfTies)

    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
