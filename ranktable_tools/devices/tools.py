"""Find and run drivers' tools: each call has a deadline and returns the raw output."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ranktable_tools.errors import RanktableError

TIMEOUT_S = 10.0
_PLACES = {
    "hccn_tool": ("/usr/local/Ascend/driver/tools/hccn_tool", "/usr/bin/hccn_tool"),
    "npu-smi": ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi"),
}
_VARIABLES = {"hccn_tool": "HCCN_TOOL_PATH"}
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A command's output, stdout and stderr together, and its exit status."""

    command: tuple[str, ...]
    text: str
    status: int

    @property
    def summary(self) -> str:
        """The output on one line, truncated if long."""
        return " ".join(self.text.split())[:_MAX_SHOWN] or "nothing"


Run = Callable[[Sequence[str]], ToolOutput]


def find_tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Return a tool's path: from its variable, PATH, or the driver's default location; None if not found."""
    named = environ.get(_VARIABLES.get(name, ""))
    if named:
        return named
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    return found or next((place for place in _PLACES.get(name, ()) if os.access(place, os.X_OK)), None)


def run_tool(
    command: Sequence[str], *, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> ToolOutput:
    """Run one command. These tools report errors in their output; their exit status differs between versions.

    Raises RanktableError if it cannot be run or does not exit within `timeout_s`; it is then killed.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
            check=False, env=None if environ is None else dict(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RanktableError(f"{' '.join(command)}: did not exit within {timeout_s:g} s") from error
    except OSError as error:
        raise RanktableError(f"{' '.join(command)}: cannot be run: {error.strerror}") from error
    return ToolOutput(tuple(command), done.stdout.decode(errors="replace"), done.returncode)
