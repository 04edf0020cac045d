"""Metrics of processes restarted by `pdserve up`, read from its state file at every scrape."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

VARIABLE = "PDSERVE_STATE_FILE"
"""The file's path, in the environment of a scheduler that `pdserve up` started."""
_MAX_BYTES = 1 << 20
_LABELS = ("name", "phase")


class ReplacementCollector:
    """Exposes the restarts of each process and the phases of its last restart; without the file, nothing."""

    def __init__(self, state: Path | None) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not read the file."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        restarts = CounterMetricFamily("pdserve_restarts", "Restarts by `pdserve up`", labels=("name",))
        seconds, cpu = (
            GaugeMetricFamily(f"pdserve_replacement_{what}", f"{text} in a phase of the last restart", labels=_LABELS)
            for what, text in (("seconds", "Seconds spent"), ("cpu_seconds", "CPU seconds used by the new process"))
        )
        for process in self._processes():
            restarts.add_metric((process["name"],), process["restarts"])
            for phase, spent, cpu_s in process["phases"]:
                seconds.add_metric((process["name"], phase), spent)
                cpu.add_metric((process["name"], phase), cpu_s)
        yield from (restarts, seconds, cpu)

    def _processes(self) -> list[dict[str, Any]]:
        """Return the processes with the exposed values, none if the file is missing or invalid."""
        if self._state is None:
            return []
        try:
            with self._state.open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))["processes"]
            return [_check_process(process) for process in found]
        except (OSError, ValueError, TypeError, KeyError):
            return []


def _check_process(process: dict[str, Any]) -> dict[str, Any]:
    phases = [(str(name), float(seconds), float(cpu_s)) for name, seconds, cpu_s in process["phases"]]
    return {"name": str(process["name"]), "restarts": int(process["restarts"]), "phases": phases}
