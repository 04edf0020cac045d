"""The server's nonces: each good for one call within seconds, and asking for them costs the server no memory.

    nonce | issued u64, milliseconds | random 16 bytes | tag 16 bytes: HMAC over both and the opener's nonce |

The tag proves that a nonce is ours, so only used ones are kept, and only who proved the secret can use one.
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
    """Owner of the key behind this process's nonces and of those used and not yet expired. One thread uses it."""

    def __init__(self, clock: Callable[[], float], *, max_used: int = MAX_USED) -> None:
        self._clock, self._max_used = clock, max_used
        self._key = secrets.token_bytes(32)
        self._expiry_by_used: dict[bytes, float] = {}

    def issue(self, opener_nonce: bytes) -> bytes:
        """Return a new nonce for the side that showed this one."""
        body = int(self._clock() * 1000).to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(_RANDOM_BYTES)
        return body + self._tag(body, opener_nonce)

    def problem(self, nonce: bytes, opener_nonce: bytes) -> str | None:
        """Say why a nonce is not good for a call now; None when it is."""
        body = nonce[: _TIME_BYTES + _RANDOM_BYTES]
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(nonce[len(body) :], self._tag(body, opener_nonce)):
            return "its nonce is not one of this process"
        age_s = self._clock() - int.from_bytes(body[:_TIME_BYTES], "big") / 1000
        if age_s > NONCE_LIFE_S:
            return f"its nonce is {age_s:.1f} s old, the limit is {NONCE_LIFE_S:g} s"
        if nonce in self._expiry_by_used:
            return "its nonce was used before"
        self._forget_expired()
        if len(self._expiry_by_used) >= self._max_used:
            return f"{len(self._expiry_by_used)} nonces were used within {NONCE_LIFE_S:g} s, the limit is reached"
        return None

    def use(self, nonce: bytes) -> None:
        """Note that a nonce without a problem, and with a proof, is spent."""
        self._expiry_by_used[nonce] = self._clock() + NONCE_LIFE_S

    def _forget_expired(self) -> None:
        now = self._clock()
        # Kept in the order of use, so the oldest come first.
        while self._expiry_by_used:
            oldest = next(iter(self._expiry_by_used))
            if self._expiry_by_used[oldest] > now:
                return
            del self._expiry_by_used[oldest]

    def _tag(self, body: bytes, opener_nonce: bytes) -> bytes:
        return hmac.digest(self._key, body + opener_nonce, "sha256")[:_TAG_BYTES]
