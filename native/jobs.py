"""Run commands in parallel with one deadline for all; when one fails, the others are killed."""

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from native.cache import BuildFailed, BuildStopped, NoNative
from native.termination import defer_signals

_READ_BYTES = 4096
_OUTPUT_MAX = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadline, cancellation and priority of commands.

    `deadline` is a time of time.monotonic(). Commands are killed once `stop_fd` is readable or at EOF. `nice` is their
    niceness.
    """

    deadline: float
    stop_fd: int | None = None
    nice: int = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())


def run_jobs(commands: Iterable[Sequence[str]], environ: Mapping[str, str], *, at_once: int, limits: Limits) -> None:
    """Run the commands, `at_once` at a time, without stdin.

    Raises BuildFailed with the output of the first command that failed, NoNative if one is late or cannot be run, and
    BuildStopped. All processes are killed first.
    """
    waiting, running = list(reversed(list(commands))), set[_Job]()
    with selectors.DefaultSelector() as selector:
        if limits.stop_fd is not None:
            selector.register(limits.stop_fd, selectors.EVENT_READ)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    with defer_signals():
                        job = _Job(waiting.pop(), environ, limits.nice)
                        running.add(job)
                    selector.register(job.output, selectors.EVENT_READ, job)
                for job in _ready(selector, running, limits):
                    selector.unregister(job.output)
                    job.finish(limits)
                    running.remove(job)
        finally:
            for job in running:
                job.kill()


def _ready(selector: selectors.BaseSelector, running: "set[_Job]", limits: Limits) -> "list[_Job]":
    """Wait for output; return the jobs whose output has ended."""
    found = selector.select(limits.left_s)
    if not found:
        late = ", ".join(sorted({job.program for job in running}))
        raise NoNative(f"{late} did not end within its time limit")
    if any(key.data is None for key, _ in found):
        raise BuildStopped("the build was stopped")
    jobs: list[_Job] = [key.data for key, _ in found]
    return [job for job in jobs if not job.read()]


class _Job:
    """One command in its own process group: a compiler runs several processes."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], nice: int) -> None:
        self.program, self._output = shlex.join(command[:1]), b""
        try:
            self._process = subprocess.Popen(  # noqa: S603  the user's own compiler on our own source
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        except OSError as error:
            raise NoNative(f"{command[0]} cannot be run: {error}") from error
        if nice:
            with contextlib.suppress(OSError):  # it has exited already
                os.setpriority(os.PRIO_PGRP, self._process.pid, nice)
        assert self._process.stdout is not None
        self.output = self._process.stdout

    def read(self) -> bool:
        """Read available output; return False at its end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        self._output = (self._output + data)[:_READ_BYTES]
        return bool(data)

    def finish(self, limits: Limits) -> None:
        """Wait for the exit of the command, whose output has ended. Raises BuildFailed, NoNative."""
        try:
            code = self._process.wait(limits.left_s)
        except subprocess.TimeoutExpired as error:
            raise NoNative(f"{self.program} did not end within its time limit") from error
        self.output.close()
        if code != 0:
            output = " ".join(self._output.decode(errors="replace").split())
            raise BuildFailed(f"{self.program} ended with {code}: {output[:_OUTPUT_MAX]}")

    def kill(self) -> None:
        """Kill all its processes."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.output.close()
