"""One process of a cluster on this machine: its name, command line and environment."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_OTHERS = ("NODE_PORTS", "PDSERVE_SECRET_FILE", "USE_OPENAI")


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to start; `env` is added to our own environment."""

    name: str
    role: str
    address: str
    command: tuple[str, ...]
    env: Mapping[str, str]


def launch_command(host: str, port: int, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a cluster process; its environment determines its role."""
    return (*_launcher_command(), "--host", host, "--port", str(port), *flags)


def launch_flags(plan: ProcessPlan) -> tuple[str, ...] | None:
    """Return the flags of a command line made by launch_command, None for another program."""
    start = _launcher_command()
    return plan.command[len(start) :] if plan.command[: len(start)] == start else None


def _launcher_command() -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "pdserve.launch")


def environment(plan: ProcessPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: ours and the plan's, without variables of another cluster."""
    return {key: value for key, value in environ.items() if key not in _OF_OTHERS} | dict(plan.env)
