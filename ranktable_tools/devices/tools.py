"""Find and run the tools that come with a driver: each call has a deadline, and what it said comes back as it is."""

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
    """What one command said, on both outputs, and its exit status."""

    command: tuple[str, ...]
    text: str
    status: int

    @property
    def said(self) -> str:
        """The answer on one line, cut where it is long."""
        return " ".join(self.text.split())[:_MAX_SHOWN] or "nothing"


Run = Callable[[Sequence[str]], ToolOutput]


def find_tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a tool: its own variable, PATH, else where the driver puts it; None where it is nowhere."""
    named = environ.get(_VARIABLES.get(name, ""))
    if named:
        return named
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    return found or next((place for place in _PLACES.get(name, ()) if os.access(place, os.X_OK)), None)


def run_tool(
    command: Sequence[str], *, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> ToolOutput:
    """Run one command to its end. These tools tell errors in words, with a status that differs between versions.

    Raises RanktableError when it cannot be run or does not end within `timeout_s`; it is killed then.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
            check=False, env=None if environ is None else dict(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RanktableError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise RanktableError(f"{' '.join(command)}: cannot be run: {error.strerror}") from error
    return ToolOutput(tuple(command), done.stdout.decode(errors="replace"), done.returncode)
