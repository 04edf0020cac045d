"""A Hugging Face hub on loopback: the routes that the hub's library uses, over folders of this machine.

GET  /api/models/NAME[/revision/REVISION] files and commit
HEAD, GET /NAME/resolve/REVISION/FILE     a file
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Owns the server. `repos` are folders by name; `seen` are methods, paths and tokens of requests, in order."""

    def __init__(self, repos: Mapping[str, Path]) -> None:
        self.repos = dict(repos)
        self.gated: set[str] = set()
        self.needs_token: set[str] = set()
        self.token = "hf_tokenoftests"
        self.seen: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        """The server's URL, as HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def fetched(self) -> list[str]:
        """Files that were downloaded, in order."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for m, path, _ in self.seen
            if m == "GET" and "/resolve/" in path
        ]

    def commit(self, name: str) -> str:
        """Return the commit of a repository, computed from its content."""
        digest = hashlib.sha1(name.encode())
        for file in self.files(name):
            digest.update(f"{file} ".encode() + (self.repos[name] / file).read_bytes())
        return digest.hexdigest()

    def files(self, name: str) -> list[str]:
        """Return the names of a repository's files."""
        folder = self.repos[name]
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(300)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.owner.seen.append((self.command, path, authorization.removeprefix("Bearer ") if authorization else None))
        for name in sorted(self.owner.repos, key=len, reverse=True):
            listing, file = f"/api/models/{name}", f"/{name}/resolve/"
            if path == listing or path.startswith(f"{listing}/revision/"):
                revision = path.removeprefix(listing).removeprefix("/revision/") or "main"
                return self._listing(name, revision) if self._check_access(name, authorization) else None
            if path.startswith(file):
                rest = path.removeprefix(file).split("/", 1)
                return self._file(name, *rest) if self._check_access(name, authorization) else None
        return self._fail(401, "RepoNotFound", "Invalid username or password.")

    def _check_access(self, name: str, authorization: str | None) -> bool:
        if name in self.owner.gated:
            self._fail(403, "GatedRepo", f"Access to model {name} is restricted")
            return False
        if name in self.owner.needs_token and authorization != f"Bearer {self.owner.token}":
            self._fail(401, "RepoNotFound", "Repository not found")
            return False
        return True

    def _listing(self, name: str, revision: str) -> None:
        commit = self.owner.commit(name)
        if revision not in ("main", "v1.0", commit):
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        folder = self.owner.repos[name]
        siblings = [{"rfilename": file, "size": (folder / file).stat().st_size} for file in self.owner.files(name)]
        return self._answer(
            {"_id": "1", "id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings}
        )

    def _file(self, name: str, revision: str, file: str) -> None:
        path = self.owner.repos[name] / file
        if not path.is_file():
            return self._fail(404, "EntryNotFound", f"Entry not found: {file}")
        body = path.read_bytes()
        headers = {"X-Repo-Commit": self.owner.commit(name), "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        return self._send(200, body, headers)

    def _answer(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, words: str) -> None:
        self._send(status, json.dumps({"error": words}).encode(), {"X-Error-Code": code, "X-Error-Message": words})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: `seen` has the request."""
