"""How much one transfer may take: bytes, seconds and tries."""

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that one exchange waits for each step, and the least speed at which a file may come or go."""

    connect_s: float = 10.0
    """For the name, the connection and the certificate together."""
    idle_s: float = 30.0
    """For an answer to begin, and for each next `window_bytes`."""
    floor_bytes_per_s: int = 1024

    @property
    def window_bytes(self) -> int:
        """Bytes that must come or go within `idle_s`."""
        return max(1, int(self.floor_bytes_per_s * self.idle_s))


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after how long a failed exchange is tried again; delays double, a jitter takes up to half off."""

    tries: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def delay_s(self, failures: int, jitter: float) -> float:
        """Return the seconds to wait after so many failures; `jitter` lies in 0..1."""
        whole: float = min(self.max_delay_s, self.first_delay_s * 2 ** (failures - 1))
        return whole * (1 - jitter / 2)


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """What one download may take, all its tries together."""

    max_bytes: int = 200_000_000
    max_redirects: int = 5
    whole_s: float = 3600.0
    waits: Waits = field(default_factory=Waits)
    retries: Retries = field(default_factory=Retries)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What one upload may take, all its tries together: more than a download, for hours of work go up with it."""

    whole_s: float = 6 * 3600.0
    expect_from_bytes: int = MIB
    """From this size on the server is asked before the body goes out (Expect: 100-continue)."""
    expect_s: float = 3.0
    """A server that says neither yes nor no within this gets the body unasked."""
    waits: Waits = field(default_factory=Waits)
    retries: Retries = field(default_factory=lambda: Retries(tries=8))
