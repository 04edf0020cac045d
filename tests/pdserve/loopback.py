"""A server on loopback for batches: files to fetch, a target for uploads, and a model that answers one word."""

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Loopback:
    """Owns the server. `files` are served by path; `statuses` are the answers to PUTs, 200 after the last.

    `hold` holds answers of the model back while it is clear, except the first `free` of them.
    """

    def __init__(self, files: Mapping[str, bytes] = {}, *, free: int = 0, key: str | None = None) -> None:
        self.files = dict(files)
        self.key = key
        self.statuses: list[int] = []
        self.puts: list[tuple[str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.requests: dict[str, int] = defaultdict(int)
        self.hold = threading.Event()
        self.hold.set()
        self.free = free
        self.held = threading.Semaphore(0)
        self._lock = threading.Lock()
        loopback = self

        class Handler(_Handler):
            owner = loopback

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def say(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's answer, which repeats the prompt; wait while answers are held."""
        with self._lock:
            self.requests[str(body.get("prompt"))] += 1
            waits = sum(self.requests.values()) > self.free
        if waits and not self.hold.is_set():
            self.held.release()
            self.hold.wait(300)
        reported = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        choice = {"index": 0, "text": f"said {body.get('prompt')}", "logprobs": None, "finish_reason": "stop"}
        return reported | {"choices": [choice], "usage": usage}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(300)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Loopback

    def do_GET(self) -> None:
        """Serve a file, or the card of the model."""
        if self.path == "/v1/models" and not self._has_key():
            return self._send(401, b'{"error": {"message": "no"}}')
        if self.path == "/v1/models":
            return self._send(200, json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode())
        content = self.owner.files.get(self.path.partition("?")[0])
        return self._send(404, b"no such key") if content is None else self._send(200, content)

    def do_PUT(self) -> None:
        """Accept a file, or refuse it."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.owner.puts.append((self.path, content))
        self.owner.headers.append(dict(self.headers))
        status = self.owner.statuses.pop(0) if self.owner.statuses else 200
        self._send(status, b"" if status == 200 else b"AccessDenied: the bucket says no")

    def do_POST(self) -> None:
        """Answer as the model."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.headers.append(dict(self.headers))
        self._send(200, json.dumps(self.owner.say(self.path, body)).encode())

    def _has_key(self) -> bool:
        return self.owner.key is None or self.headers.get("Authorization") == f"Bearer {self.owner.key}"

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(ConnectionError):  # a client that was stopped has disconnected
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
