"""JSON lines between the benchmark's processes: over pipes to the parent, over Unix sockets from P to D."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 300.0
_SHOWN_ERROR = 600


class Child:
    """The parent's handle of a benchmark process that answers each JSON line with one; owns the process."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str] | None = None) -> None:
        """Start it and wait for its first line. Its standard error is shown only if it fails."""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  open until close()
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.ready = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises RuntimeError with the child's error, or if it ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended_error() from error
        return self._read()

    def close(self) -> None:
        """End the child: close its input, and kill it if that does not end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        """Read the next JSON line and skip the output of libraries. A child without an answer for minutes is killed."""
        assert self._process.stdout is not None
        watch = threading.Timer(ANSWER_S, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    if "error" in answer:
                        raise RuntimeError(answer["error"])
                    return answer
        finally:
            watch.cancel()
        raise self._ended_error()

    def _ended_error(self) -> RuntimeError:
        status = self._process.wait(10)
        self._errors.seek(0)
        return RuntimeError(f"a child ended with status {status}: {self._errors.read()[-_SHOWN_ERROR:].strip()}")


def python_child(module: str, *arguments: str) -> Child:
    """Start `benchmarks/kv/MODULE.py` as a child process."""
    return Child([sys.executable, str(ROOT / "benchmarks" / "kv" / f"{module}.py"), *arguments])


def serve_stdin(handle: Callable[[dict[str, Any]], dict[str, Any]], **ready: Any) -> None:
    """Report this child ready and answer the parent until it closes the pipe; errors are sent as answers."""
    print(json.dumps({"ready": True, **ready}), flush=True)
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Server(Protocol):
    """One end of the measured hand-off."""

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer the parent, or the other end."""

    def close(self) -> None:
        """End its links."""


def run_child(make: Callable[[dict[str, Any]], Server], *, about: str | None, fields: str) -> None:
    """Run the server that `make` builds from the argument, JSON with these fields, until the parent ends it.

    It runs on the core that the argument names. If `make` fails, the parent gets the error as one line.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("config", help=f"JSON: {fields}")
    config = json.loads(parser.parse_args().config)
    if config["core"] is not None:
        os.sched_setaffinity(0, {config["core"]})
    try:
        server = make(config)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(1)
    serve_stdin(server.handle)
    server.close()


class LineServer:
    """A Unix socket on which each connection is answered line by line by its own thread."""

    def __init__(self, path: str, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._handle = handle
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="line-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), name="line-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                lines.write(json.dumps(self._handle(json.loads(line))) + "\n")
                lines.flush()


class LineClient:
    """P's connection to the socket of one D."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer
