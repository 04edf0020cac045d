"""Shared code of all peers' runners: commands on standard input, one JSON line each, and verifiable bytes.

    stdin   | {"bytes": N, "verify": false}
    stdout  | {"ready": "name", "pids": [...]}, then {"seconds": S, "verified": true|false|null} for each command

Runs in the peers' own environments: standard library only, nothing of ours.
"""

import argparse
import base64
import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def arguments(about: str | None) -> argparse.Namespace:
    """Return `max_bytes` and `source`; from now on this process ends with its parent."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-bytes", type=int, required=True, help="bytes of the largest move")
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    die_with_parent()
    return args


class Region:
    """Anonymous memory of `size` bytes, every page of it touched."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, self.size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.clear()

    def clear(self) -> None:
        """Write zeros to the whole region."""
        zeros = bytes(PAGE_BYTES)
        for at in range(0, self.size, PAGE_BYTES):
            self.view[at : at + PAGE_BYTES] = zeros

    def fill(self) -> None:
        """Write the pattern: random pages, each with its number in front."""
        for number in range(self.size // PAGE_BYTES):
            self.view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = pattern(number)

    def holds_pattern(self, size: int) -> bool:
        """Return whether the first `size` bytes are those of `fill`."""
        for number in range(-(-size // PAGE_BYTES)):
            count = min(PAGE_BYTES, size - number * PAGE_BYTES)
            if self.view[number * PAGE_BYTES :][:count] != pattern(number)[:count]:
                return False
        return True


_page = random.Random(7).randbytes(PAGE_BYTES - 8)


def pattern(number: int) -> bytes:
    """Return the page of that number."""
    return number.to_bytes(8, "little") + _page


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; otherwise it would stay forever if stopped by SIGSTOP."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(name: str, region: Region, source_pid: int, move: Callable[[int], float]) -> None:
    """Answer each command with the seconds that `move(num_bytes)` took; `region` is where the bytes arrive."""
    write_line({"ready": name, "pids": [os.getpid(), source_pid]})
    for line in sys.stdin:
        command = json.loads(line)
        size, verify = int(command["bytes"]), bool(command.get("verify"))
        if verify:
            region.clear()
        seconds = move(size)
        write_line({"seconds": seconds, "verified": region.holds_pattern(size) if verify else None})


def start_source(*arguments: str) -> "subprocess.Popen[str]":
    """Start this script's other process, which holds the bytes; it ends when its standard input closes."""
    command = [sys.executable, sys.argv[0], "--source", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Read one JSON line of the other process and skip the output of its libraries."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            fields: dict[str, Any] = json.loads(line)
            return fields
    raise RuntimeError(f"the source process ended with status {process.wait(10)}")


def write_line(fields: dict[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(fields), flush=True)


def to_text(data: bytes) -> str:
    """Encode bytes for a JSON line."""
    return base64.b64encode(data).decode("ascii")


def from_text(text: str) -> bytes:
    """Undo `to_text`."""
    return base64.b64decode(text)
