"""This machine for the checks: its files, environment and tools; each command is run once, never concurrently."""

import os
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ranktable_tools.devices.kinds import DeviceKind, find_kind, present_devices
from ranktable_tools.devices.tools import Run, ToolOutput, find_tool, run_tool
from ranktable_tools.errors import RanktableError

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_GROUPS = ("docker", "kubepods", "containerd", "crio", "lxc")


class Machine:
    """Reads files below `root`. Owns the cache of tools' outputs; drivers' tools do not support concurrent calls."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        root: Path = Path("/"),
        cores: tuple[int, ...] | None = None,
        kind: DeviceKind | None = None,
        run: Run = run_tool,
    ) -> None:
        self.environ = environ
        self.root = root
        self.cores = tuple(sorted(os.sched_getaffinity(0))) if cores is None else cores
        self._kind = kind
        self._run = run
        self._answers: dict[tuple[str, ...], ToolOutput | RanktableError] = {}
        self._one_at_a_time = threading.Lock()

    @cached_property
    def kind(self) -> DeviceKind:
        """Its kind of device."""
        return self._kind or find_kind(self.path("/dev"))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device ids with a device node."""
        return present_devices(self.kind, self.path("/dev"))

    @property
    def in_container(self) -> bool:
        """Whether this looks like a container."""
        if any(self.path(mark).exists() for mark in _CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in self.environ:
            return True
        groups = self.text("/proc/1/cgroup") or ""
        return any(word in groups for word in _CONTAINER_GROUPS)

    def path(self, path: str) -> Path:
        """Return the path of a file of the machine."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return a file's text, None if it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def tool(self, name: str) -> str | None:
        """Return the path of a tool."""
        return find_tool(name, self.environ)

    def run_tool(self, name: str, *arguments: str) -> ToolOutput | None:
        """Return a tool's output, None if it is not installed. Raises RanktableError if it fails or times out."""
        tool = self.tool(name)
        if tool is None:
            return None
        command = (tool, *arguments)
        with self._one_at_a_time:
            if command not in self._answers:
                self._answers[command] = self._answer(command)
            answer = self._answers[command]
        if isinstance(answer, RanktableError):
            raise RanktableError(str(answer))
        return answer

    def _answer(self, command: tuple[str, ...]) -> ToolOutput | RanktableError:
        try:
            return self._run(command)
        except RanktableError as error:
            return error
