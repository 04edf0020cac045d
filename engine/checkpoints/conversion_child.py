"""Convert a model's files in a separate process, so that the caller needs no torch and survives a crash."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from processes.child_limits import signal_at_parent_end
from wire.errors import ConfigError

TIMEOUT_S = 3600.0
_REFUSED = 3  # exit status of a refusal, whose reason is the last line of stderr


def convert_in_child(module: str, source: Path, target: Path, parts: Sequence[str] = ()) -> None:
    """Run `python -m module SOURCE TARGET PARTS`. Raises ConfigError with the last line of its stderr."""
    command = [sys.executable, "-P", "-m", module, str(source.resolve()), str(target), *parts]
    try:
        done = subprocess.run(  # noqa: S603 - a module of this package
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"converting {source} took longer than {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(last if done.returncode == _REFUSED else f"{source} cannot be converted: {last}")


def run_conversion(source: Path, convert: Callable[[], None]) -> int:
    """Convert, and return the child's exit status; the last line of stderr is the reason for a refusal.

    The kernel kills the child when its parent ends.
    """
    signal_at_parent_end(signal.SIGKILL)
    try:
        convert()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{source}: converting needs {error.name}: pip install 'pdserve[engine]'\n")
        return _REFUSED
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    return 0
