"""A few calls of the Kubernetes API over HTTPS with the pod's own token: ConfigMaps and the list of pods.

Proxy variables are ignored, every call has a deadline, and the token is read for each call: the kubelet renews it.
"""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ranktable_tools.errors import RanktableError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
_MAX_BYTES = 32 * 1024 * 1024


class KubeError(RanktableError):
    """A call failed; `status` is the API server's HTTP status, None without a response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, code="kubernetes")
        self.status = status


@dataclass(frozen=True, slots=True)
class ConfigMap:
    """A ConfigMap as read; `document` is the whole object, including its resourceVersion."""

    name: str
    document: Mapping[str, Any]

    @property
    def data(self) -> Mapping[str, str]:
        """Its values by key."""
        found: Mapping[str, str] = self.document.get("data") or {}
        return found


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod: its addresses, including its node's, and whether it is terminating or has terminated."""

    name: str
    addresses: tuple[str, ...]
    leaving: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The API server's URL and credentials. Files are read at each call."""

    url: str
    namespace: str
    token_file: Path
    ca_file: Path | None = None


def access_in_pod(environ: Mapping[str, str], account: Path = ACCOUNT) -> Access:
    """Return the access that the kubelet provides to a pod. Raises KubeError naming what is missing."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise KubeError("KUBERNETES_SERVICE_HOST is not set: run this in a pod")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(url, _text(account / "namespace"), account / "token", account / "ca.crt")


class KubeApi:
    """The calls; each opens its own connection. They raise KubeError with the API server's status."""

    def __init__(self, access: Access, timeout_s: float = TIMEOUT_S) -> None:
        self._access, self._timeout_s = access, timeout_s

    def config_map(self, name: str) -> ConfigMap:
        """Return a ConfigMap."""
        return ConfigMap(name, self._call("GET", f"configmaps/{quote(name)}"))

    def replace(self, old: ConfigMap, data: Mapping[str, str]) -> None:
        """Write `data` in place of what was read. Status 409: another writer was first, nothing was changed."""
        self._call("PUT", f"configmaps/{quote(old.name)}", {**old.document, "data": dict(data)})

    def set_keys(self, name: str, data: Mapping[str, str | None]) -> None:
        """Write only these keys of a ConfigMap; None removes a key."""
        patch = {"data": dict(data)}
        self._call("PATCH", f"configmaps/{quote(name)}", patch, "application/merge-patch+json")

    def pods(self, selector: str) -> tuple[Pod, ...]:
        """Return the pods with these labels, such as `app=pdserve`."""
        found = self._call("GET", f"pods?{urlencode({'labelSelector': selector})}")
        return tuple(_parse_pod(item) for item in found.get("items") or ())

    def _call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        path = f"/api/v1/namespaces/{quote(self._access.namespace)}/{path}"
        what = f"{method} {path.split('?')[0]}"
        headers = {"Authorization": f"Bearer {_text(self._access.token_file)}", "Accept": "application/json"}
        sent = None if body is None else json.dumps(body)
        try:
            connection = self._connect()
            try:
                connection.request(method, path, sent, {**headers, "Content-Type": kind} if sent else headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_BYTES + 1)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise KubeError(f"{what}: {self._access.url} does not respond: {error or type(error).__name__}") from error
        return _document(what, answer.status, text)

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._access.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        context = ssl.create_default_context(cafile=self._access.ca_file)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)


def _document(what: str, status: int, text: bytes) -> dict[str, Any]:
    if len(text) > _MAX_BYTES:
        raise KubeError(f"{what}: a response of more than {_MAX_BYTES} bytes", status)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise KubeError(f"{what}: status {status}, and the body is not JSON: {text[:80]!r}", status) from error
    if not isinstance(document, dict):
        raise KubeError(f"{what}: status {status}, and the body is not a JSON object: {text[:80]!r}", status)
    if status >= 300:
        raise KubeError(f"{what}: status {status}: {document.get('message', '')}", status)
    return document


def _parse_pod(item: Mapping[str, Any]) -> Pod:
    metadata, status = item.get("metadata") or {}, item.get("status") or {}
    addresses = [status.get("podIP"), *(each.get("ip") for each in status.get("podIPs") or ()), status.get("hostIP")]
    leaving = bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed")
    return Pod(str(metadata.get("name", "")), tuple(str(each) for each in addresses if each), leaving)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KubeError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
