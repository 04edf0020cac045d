"""Check a device's kernels in a child process before this process runs them; good results are cached by version.

    check --good before, with these versions and sources?--> good
          --child on the same device, with inputs of its own--> good, or why not

An illegal access poisons the context of its process: every later call fails there, and no kernel can replace the one
that failed. So only kernels that passed in a child run here; if the child dies or exceeds its time, they have failed.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from devices.interface import Device
from devices.versions import format_versions, kernel_versions
from native.cache import NoNative, exists_and_is_own, library_folder
from telemetry.logs import EventLogger

_log = EventLogger("engine")
CHILD = "engine.kernel_child"
NOT_HERE = 3
"""The child's exit status if it cannot use the device at all, with the reason as stderr's last line."""
LIMIT_S = 300.0
"""The time limit of a check, which includes compiling kernels at their first use."""
_KILLED_S = 5.0

Here = Callable[[], str | None]
"""Runs the same check in this process: returns why the kernels are not used, None if they are good."""


class KernelCheck(Protocol):
    """Checks kernels by the name of a check of engine/kernel_child.py, with its JSON parameters."""

    def __call__(self, name: str, params: Mapping[str, Any], here: Here) -> str | None:
        """Return why these kernels must not be used, None if they are good."""
        ...


def check_here(name: str, params: Mapping[str, Any], here: Here) -> str | None:
    """Implements KernelCheck in this process."""
    return here()


def kernel_check(device: Device) -> KernelCheck:
    """Return how kernels of this device are checked: in a child if the device requires it."""
    if not device.checks_in_child:
        return check_here
    versions = f"{device.describe()}, {format_versions(kernel_versions())}"
    return ChildCheck(device.name, versions, library_folder(os.environ).parent / "kernels")


@dataclass(frozen=True, slots=True)
class ChildCheck:
    """Implements KernelCheck with one child process for each check.

    `versions` names all that a result depends on, besides our sources. `folder` holds a file for each good result.
    """

    device: str
    versions: str
    folder: Path
    child: str = CHILD
    limit_s: float = LIMIT_S

    def __call__(self, name: str, params: Mapping[str, Any], here: Here) -> str | None:
        """See KernelCheck. Runs the check here if a child cannot use the device beside this process."""
        request = json.dumps({"device": self.device, "check": name, "params": dict(params)}, sort_keys=True)
        known = self.folder / hashlib.sha256(f"{self.versions}\n{_sources()}\n{request}".encode()).hexdigest()
        with contextlib.suppress(NoNative):
            if exists_and_is_own(known):
                return None
        status, out, err = _run([sys.executable, "-P", "-m", self.child], request, self.limit_s)
        last = (err.strip().splitlines() or ["no message"])[-1]
        if status == NOT_HERE:
            _log.warning("kernels_checked_in_service", check=name, device=self.device, reason=last)
            return here()
        why = _answer(out)
        if status is None:
            return f"the check in a child process took more than {self.limit_s:g} s"
        if status != 0 or why is None:
            return f"the check ended a child process with {_format_status(status)}: {last}"
        if not why:
            _remember(known)
        return why or None


def _run(command: list[str], request: str, limit_s: float) -> tuple[int | None, str, str]:
    """Return the child's exit status, None if it was killed at the time limit, and the ends of stdout and stderr."""
    process = subprocess.Popen(  # noqa: S603 - a module of this package
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, err = process.communicate(request, timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a driver's call may not end
            process.communicate(timeout=_KILLED_S)
        return None, "", ""
    return process.returncode, out, err


def _answer(out: str) -> str | None:
    """Return the reason that the child printed in its last line, "" for a good kernel, None if it printed none."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        why = json.loads(out.strip().splitlines()[-1])["why"]
        return why if isinstance(why, str) else "" if why is None else None
    return None


def _format_status(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def _sources() -> str:
    """Return a digest of the engine's sources, which call the kernels and check them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remember(path: Path) -> None:
    """Make the file of a good result; without a folder to write to, the check runs again at the next start."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        os.close(descriptor)
        os.replace(draft, path)
