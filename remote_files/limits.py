"""Limits of one transfer: bytes, seconds and tries."""

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that one exchange waits for each step, and the lowest allowed speed of a transfer."""

    connect_s: float = 10.0
    """Until the name is resolved, the connection is open and its certificate checked."""
    idle_s: float = 30.0
    """Until the answer starts, and then for each further `window_bytes`."""
    floor_bytes_per_s: int = 1024

    @property
    def window_bytes(self) -> int:
        """Bytes that must be transferred within `idle_s`."""
        return max(1, int(self.floor_bytes_per_s * self.idle_s))


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after which delay a failed exchange is retried; delays double, jitter subtracts up to half."""

    tries: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def delay_s(self, failures: int, jitter: float) -> float:
        """Return the seconds to wait after this many failures; `jitter` is in 0..1."""
        whole: float = min(self.max_delay_s, self.first_delay_s * 2 ** (failures - 1))
        return whole * (1 - jitter / 2)


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Limits of one download, for all its tries together."""

    max_bytes: int = 200_000_000
    max_redirects: int = 5
    whole_s: float = 3600.0
    waits: Waits = field(default_factory=Waits)
    retries: Retries = field(default_factory=Retries)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of one upload, for all its tries together: higher than a download's, as uploads carry hours of work."""

    whole_s: float = 6 * 3600.0
    expect_from_bytes: int = MIB
    """From this size on the server must accept the upload before the body is sent (Expect: 100-continue)."""
    expect_s: float = 3.0
    """After this time without an answer the body is sent anyway."""
    waits: Waits = field(default_factory=Waits)
    retries: Retries = field(default_factory=lambda: Retries(tries=8))
