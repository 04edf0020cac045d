"""One process of a cluster on this machine: what it is called, what it runs, and with what environment."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_OTHERS = ("NODE_PORTS", "PDSERVE_SECRET_FILE", "USE_OPENAI")


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to start; `env` is what it has beside our own environment."""

    name: str
    role: str
    address: str
    command: tuple[str, ...]
    env: Mapping[str, str]


def launch_command(host: str, port: int, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a process of a cluster; which one it is, its environment says."""
    return (*_launcher(), "--host", host, "--port", str(port), *flags)


def launch_flags(plan: ProcessPlan) -> tuple[str, ...] | None:
    """Return the flags of what launch_command made, None for another program."""
    start = _launcher()
    return plan.command[len(start) :] if plan.command[: len(start)] == start else None


def _launcher() -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "pdserve.launch")


def environment(plan: ProcessPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: ours, without what would mean another cluster."""
    return {key: value for key, value in environ.items() if key not in _OF_OTHERS} | dict(plan.env)
