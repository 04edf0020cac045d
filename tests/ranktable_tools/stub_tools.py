"""Executables that stand in for a driver's tools: each answers a command line with recorded text."""

import shlex
from collections.abc import Mapping
from pathlib import Path


def write_stub(folder: Path, name: str, answers: Mapping[str, str], *, status: int = 0, other: str = "") -> Path:
    """Write `folder/name`: its arguments, joined by spaces, select the answer; each call is recorded in `folder/calls`.

    Any other arguments are answered with `other` and status 13, as hccn_tool does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cases = "\n".join(
        f"    {shlex.quote(arguments)}) printf '%s' {shlex.quote(text)}; exit {status} ;;"
        for arguments, text in answers.items()
    )
    calls = shlex.quote(str(folder / "calls"))
    path = folder / name
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {calls}\ncase "$*" in\n{cases}\nesac\n'
        f"printf '%s' {shlex.quote(other)}\nexit 13\n"
    )
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[str]:
    """Return the command lines that the stubs of `folder` were called with, in order."""
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []
