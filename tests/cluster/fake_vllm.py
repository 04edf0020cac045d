"""A small `vllm serve`: health, models and streamed completions, and the hand-off of its P/D pair.

A prefill answers with tickets; a request that claims to be a pair's and has none is refused, so that a client which
skips P is detected.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TICKET = {"remote_block_ids": [7], "remote_host": "127.0.0.1"}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    is_pair = "--kv-transfer-config" in sys.argv

    def do_GET(self) -> None:
        """/health and /v1/models."""
        self._json({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        """/v1/completions."""
        requested = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ticket = requested.get("kv_transfer_params")
        if not requested["stream"]:
            self._json({"kv_transfer_params": _TICKET})
        elif ticket != (_TICKET if self.is_pair else None):
            self._json({"error": {"message": f"a ticket of {ticket}"}}, 400)
        else:
            self._stream(len(requested["prompt"]), requested["max_tokens"])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _json(self, fields: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, num_prompt: int, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(count):
            finish = "length" if number == count - 1 else None
            self._event({"choices": [{"text": "a", "finish_reason": finish}]})
            time.sleep(0.001)
        self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": count}})

    def _event(self, fields: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
        self.wfile.flush()


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
