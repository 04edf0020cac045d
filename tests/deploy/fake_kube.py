"""An API server of Kubernetes over real HTTP or HTTPS: ConfigMaps with resourceVersions and conflicts, pods, roles.

Who may do what is decided by the Roles and RoleBindings it is given, which are the product's own.
"""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ranktable_tools.kube.api import Access
from security.tls import TlsFiles

NAMESPACE = "models"
Object = dict[str, Any]


@dataclass(slots=True)
class Cluster:
    """What the server keeps. `accounts` has each token's service account; without roles a token may do anything."""

    roles: Sequence[Object] = ()
    bindings: Sequence[Object] = ()
    accounts: dict[str, str] = field(default_factory=dict)
    config_maps: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    before_put: Callable[[], None] | None = None
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create_config_map(self, name: str, data: Mapping[str, str] | None = None) -> None:
        """Put a ConfigMap there, as an operator does."""
        with self.lock:
            self.config_maps[name] = {
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": self.next_version()},
            } | ({"data": dict(data)} if data else {})  # fmt: skip

    def run_pod(self, name: str, ip: str | None, labels: Mapping[str, str] | None = None, **metadata: str) -> None:
        """Add a pod, or replace another one of its name."""
        with self.lock:
            self.pods[name] = {
                "metadata": {"name": name, "labels": dict(labels or {"app": "pdserve"}), **metadata},
                "status": {"phase": "Running", "podIPs": [{"ip": ip}]} | ({"podIP": ip} if ip else {}),
            }

    def data(self, name: str) -> dict[str, str]:
        """Return the texts of a ConfigMap."""
        with self.lock:
            return dict(self.config_maps[name].get("data") or {})

    def next_version(self) -> str:
        """Return a resourceVersion that nothing has yet."""
        self.version += 1
        return str(self.version)

    def allows(self, token: str, verb: str, resource: str, name: str | None) -> bool:
        """Return whether a role that is bound to the token's account allows it."""
        if not self.roles:
            return token in self.accounts
        account = self.accounts.get(token)
        bound = {
            binding["roleRef"]["name"]
            for binding in self.bindings
            if any(
                subject["kind"] == "ServiceAccount" and subject["name"] == account for subject in binding["subjects"]
            )
        }
        rules = [rule for role in self.roles if role["metadata"]["name"] in bound for rule in role["rules"]]
        return any(
            "" in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for rule in rules
        )  # fmt: skip


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # many pods call at once
    cluster: Cluster

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that reject our certificate: another test covers them."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._serve("get")

    def do_PUT(self) -> None:
        self._serve("update")

    def do_PATCH(self) -> None:
        self._serve("patch")

    def _serve(self, verb: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        cluster = self.server.cluster
        try:
            status, answer = 200, self._answer(cluster, verb, json.loads(body) if body else None)
        except _Refused as refused:
            status, answer = refused.status, {"kind": "Status", "status": "Failure", "message": str(refused)}
        cluster.calls.append((self.command, urlsplit(self.path).path.split(f"/{NAMESPACE}/")[-1], status))
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _answer(self, cluster: Cluster, verb: str, body: Any) -> Object:
        parts = urlsplit(self.path)
        words = parts.path.strip("/").split("/")
        if words[:4] != ["api", "v1", "namespaces", NAMESPACE] or len(words) not in (5, 6):
            raise _Refused(404, f"no such path: {parts.path}")
        resource, name = words[4], words[5] if len(words) == 6 else None
        verb = "list" if verb == "get" and name is None else verb
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in cluster.accounts:
            raise _Refused(401, "Unauthorized")
        if not cluster.allows(token, verb, resource, name):
            account = cluster.accounts[token]
            raise _Refused(403, f"{resource} {name!r} is forbidden: {account} cannot {verb} it")
        if resource == "pods":
            return _list_pods(cluster, parse_qs(parts.query).get("labelSelector", [""])[0])
        if verb == "update" and cluster.before_put is not None:
            cluster.before_put()
        with cluster.lock:
            return _config_map(cluster, verb, name or "", body, self.headers.get("Content-Type", ""))


def _list_pods(cluster: Cluster, selector: str) -> Object:
    wanted = dict(word.split("=", 1) for word in selector.split(",") if word)
    with cluster.lock:
        pods = [pod for pod in cluster.pods.values() if wanted.items() <= pod["metadata"]["labels"].items()]
    return {"kind": "PodList", "items": pods}


def _config_map(cluster: Cluster, verb: str, name: str, body: Any, content_type: str) -> Object:
    old = cluster.config_maps.get(name)
    if old is None:
        raise _Refused(404, f'configmaps "{name}" not found')
    if verb == "get":
        return old
    if verb == "update":
        if body["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            raise _Refused(409, "the object has been modified; please apply your changes to the latest version")
        new = dict(body)
    else:
        if content_type != "application/merge-patch+json":
            raise _Refused(415, f"content type {content_type}")
        new = _merged(old, body)
    _check(new)
    if {**new, "metadata": None} != {**old, "metadata": None}:
        new["metadata"] = {**old["metadata"], "resourceVersion": cluster.next_version()}
        cluster.config_maps[name] = new
    return cluster.config_maps[name]


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    target = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = _merged(target.get(key), value)
    return target


def _check(document: Object) -> None:
    """Check a ConfigMap as the API server does: strings, and 1 MiB in all."""
    data = document.get("data") or {}
    if not all(isinstance(value, str) for value in data.values()):
        raise _Refused(422, "data: not all strings")
    if sum(len(key) + len(value) for key, value in data.items()) > 1024 * 1024:
        raise _Refused(422, "data: more than 1048576 bytes")


@contextmanager
def serving(cluster: Cluster, tls: TlsFiles | None = None) -> Iterator[str]:
    """Serve a cluster on a free port of this machine; yield its URL."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.cluster = cluster
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(timeout=300)
        server.server_close()


def access(url: str, folder: Path, token: str, ca: str | None = None) -> Access:
    """Return what a pod with this token needs to reach the server."""
    path = folder / f"token-{token}"
    path.write_text(token + "\n")
    return Access(url, NAMESPACE, path, None if ca is None else Path(ca))
