"""The server's nonces: each valid for one call within seconds; issuing them uses no memory on the server.

    nonce | issued u64, milliseconds | random 16 bytes | tag 16 bytes: HMAC over both and the client's nonce |

The tag proves that this process issued the nonce, so only used ones are stored; using one requires the secret.
"""

import hmac
import secrets
from collections.abc import Callable

NONCE_LIFE_S = 10.0
MAX_USED = 4_096
_TIME_BYTES = 8
_RANDOM_BYTES = 16
_TAG_BYTES = 16
NONCE_BYTES = _TIME_BYTES + _RANDOM_BYTES + _TAG_BYTES


class NonceMint:
    """Owner of this process's nonce key and of the used nonces not yet expired. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], *, max_used: int = MAX_USED) -> None:
        self._clock, self._max_used = clock, max_used
        self._key = secrets.token_bytes(32)
        self._expiry_by_used: dict[bytes, float] = {}

    def issue(self, client_nonce: bytes) -> bytes:
        """Return a new nonce for the client that sent `client_nonce`."""
        body = int(self._clock() * 1000).to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(_RANDOM_BYTES)
        return body + self._nonce_tag(body, client_nonce)

    def problem(self, nonce: bytes, client_nonce: bytes) -> str | None:
        """Return why a nonce is not valid for a call now; None when it is."""
        body = nonce[: _TIME_BYTES + _RANDOM_BYTES]
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(
            nonce[len(body) :], self._nonce_tag(body, client_nonce)
        ):
            return "its nonce was not issued by this process"
        age_s = self._clock() - int.from_bytes(body[:_TIME_BYTES], "big") / 1000
        if age_s > NONCE_LIFE_S:
            return f"its nonce is {age_s:.1f} s old, but the limit is {NONCE_LIFE_S:g} s"
        if nonce in self._expiry_by_used:
            return "its nonce was used before"
        self._forget_expired()
        if len(self._expiry_by_used) >= self._max_used:
            return f"{len(self._expiry_by_used)} nonces were used within {NONCE_LIFE_S:g} s, which is the limit"
        return None

    def use(self, nonce: bytes) -> None:
        """Mark as used a nonce that passed `problem` and whose proof is correct."""
        self._expiry_by_used[nonce] = self._clock() + NONCE_LIFE_S

    def _forget_expired(self) -> None:
        now = self._clock()
        # Insertion order is the order of use, so the oldest come first.
        while self._expiry_by_used:
            oldest = next(iter(self._expiry_by_used))
            if self._expiry_by_used[oldest] > now:
                return
            del self._expiry_by_used[oldest]

    def _nonce_tag(self, body: bytes, client_nonce: bytes) -> bytes:
        return hmac.digest(self._key, body + client_nonce, "sha256")[:_TAG_BYTES]
