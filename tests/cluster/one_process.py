"""`pdserve serve` as a child process of a test."""

import subprocess

import pytest

from pdserve.client import Client


def client_of(server: subprocess.Popen[str], port: int) -> Client:
    """Return a client once the server's stderr says that it is ready; fail if it ends before."""
    assert server.stderr is not None
    messages: list[str] = []
    for line in iter(server.stderr.readline, ""):
        messages.append(line)
        if "ready" in line:
            return Client(f"http://127.0.0.1:{port}", timeout_s=300)
    pytest.fail(f"it ended with {server.wait(300)} before it was ready:\n{''.join(messages)}")
