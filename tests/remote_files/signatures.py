"""A gate before an S3 server that checks presigned requests as S3 does: by its documents, with plain HMAC.

Version 2: https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html
Version 4: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


class SignatureGate:
    """Forwards requests signed with the key or with an Authorization header; refuses others with S3's messages."""

    def __init__(self, app: App, secret_key: str) -> None:
        self._app = app
        self._secret_key = secret_key.encode()
        self.refused: list[str] = []
        self.answers_to_lose = 0

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, _, query = environ["RAW_URI"].partition("?")
        pairs = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)
        why = None
        if "Signature" in pairs:
            why = self._version_2(environ, path, pairs)
        elif "X-Amz-Signature" in pairs:
            why = self._version_4(environ, path, pairs)
        elif "HTTP_AUTHORIZATION" not in environ:
            why = "AccessDenied", "Access Denied"
        if why is None:
            return self._pass_on(environ, start_response)
        self.refused.append(why[1])
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        code, message = why
        return [f"<Error><Code>{code}</Code><Message>{message}</Message><Asked>{query}</Asked></Error>".encode()]

    def _pass_on(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not self.answers_to_lose:
            return self._app(environ, start_response)
        self.answers_to_lose -= 1
        list(self._app(environ, lambda *_: None))
        start_response("503 Service Unavailable", [])
        return []

    def _version_2(self, environ: Environ, path: str, pairs: dict[str, str]) -> tuple[str, str] | None:
        if int(pairs["Expires"]) < time.time():
            return "AccessDenied", "Request has expired"
        signed_fields = (
            environ["REQUEST_METHOD"],
            environ.get("HTTP_CONTENT_MD5", ""),
            environ.get("CONTENT_TYPE", ""),
        )
        text = "\n".join((*signed_fields, pairs["Expires"], *_amz_headers(environ), path))
        signature = base64.b64encode(hmac.digest(self._secret_key, text.encode(), "sha1")).decode()
        return None if signature == unquote(pairs["Signature"]) else _MISMATCH

    def _version_4(self, environ: Environ, path: str, pairs: dict[str, str]) -> tuple[str, str] | None:
        date = pairs["X-Amz-Date"]
        signed = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if signed.timestamp() + int(pairs["X-Amz-Expires"]) < time.time():
            return "AccessDenied", "Request has expired"
        if _amz_headers(environ):
            return "AccessDenied", "There were headers present in the request which were not signed"
        query = "&".join(f"{name}={pairs[name]}" for name in sorted(pairs) if name != "X-Amz-Signature")
        parts = (environ["REQUEST_METHOD"], path, query, f"host:{environ['HTTP_HOST']}", "", "host", "UNSIGNED-PAYLOAD")
        scope = unquote(pairs["X-Amz-Credential"]).partition("/")[2]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        text = "\n".join(("AWS4-HMAC-SHA256", date, scope, digest))
        key = b"AWS4" + self._secret_key
        for step in scope.split("/"):
            key = hmac.digest(key, step.encode(), "sha256")
        return None if hmac.digest(key, text.encode(), "sha256").hex() == pairs["X-Amz-Signature"] else _MISMATCH


_MISMATCH = ("SignatureDoesNotMatch", "The request signature we calculated does not match the signature you provided.")


def _amz_headers(environ: Environ) -> list[str]:
    names = sorted(name for name in environ if name.startswith("HTTP_X_AMZ_"))
    return [f"{name[5:].replace('_', '-').lower()}:{environ[name]}" for name in names]
