"""A Docker engine on a Unix socket that accepts all: it records what docker's own client sends for a command line."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

ID = "0" * 64


class FakeEngine(socketserver.ThreadingUnixStreamServer):
    """Owner of the socket, of what was created and of what was to be built."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.created: list[dict[str, Any]] = []
        self.contexts: list[bytes] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer(200, b"")

    def do_GET(self) -> None:
        self._answer(200, b"{}" if "_ping" not in self.path else b"OK")

    def do_POST(self) -> None:
        body = self._body()
        if "/containers/create" in self.path:
            self.server.created.append(json.loads(body))
            self._answer(201, json.dumps({"Id": ID, "Warnings": []}).encode())
        elif "/build?" in self.path:
            self.server.contexts.append(body)
            self._answer(200, b'{"stream": "built"}')
        else:
            self._answer(204, b"")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = bytearray()
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return bytes(body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        for name, value in (("Api-Version", "1.43"), ("OSType", "linux"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def fake_engine(path: Path) -> Iterator[FakeEngine]:
    """Serve at a Unix socket; yield what keeps the containers that clients created and the contexts they sent."""
    with FakeEngine(path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=300)
