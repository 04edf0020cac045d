"""Run deploy/docker_run.sh within the tests' process, and read what it prints."""

import shlex
from collections.abc import Callable

import pytest

from ranktable_tools.containers import docker_run

FLAGS = ["--image", "image1", "--dir", "/data", "--container-work-dir", "/work", "--name", "c1"]
Make = Callable[..., list[str]]
Capture = pytest.CaptureFixture[str]


def line_of(capsys: Capture, *words: str) -> list[str]:
    """Return the line that a command prints, as a shell reads it."""
    capsys.readouterr()
    status = docker_run.main(words)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return shlex.split(captured.out.replace("\\\n", ""))


def refusal_of(capsys: Capture, *words: str) -> str:
    """Return the message for bad input; no line is printed then."""
    capsys.readouterr()
    status = docker_run.main(words)
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    return captured.err
