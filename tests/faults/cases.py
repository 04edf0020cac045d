"""The fault matrix: every failpoint, every action that can be set there, and what a client may see then."""

from dataclasses import dataclass

from processes.failpoints import POINTS

HITS: dict[str, tuple[int, ...]] = {"kv.send.mid": (3,), "decode.token": (1, 5)}
"""Which hit of a point fails if not the first: a frame in the middle of a chunk, D's first and fifth token."""

VICTIMS = {"P": "prefill-0", "D": "decode-0", "scheduler": "scheduler"}
DELAY_S = 0.3
MAX_TOKENS, LONG_TOKENS = 8, 400

ANSWER, ERROR, CLOSED = "answer", "error", "closed"


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: `action` at the `hit`-th pass of `point`, in one process."""

    point: str
    hit: int
    action: str

    def __str__(self) -> str:
        """Name it as the table does."""
        return f"{self.place}={self.action}"

    @property
    def place(self) -> str:
        """The point with its hit."""
        return self.point if self.hit == 1 and self.point not in HITS else f"{self.point}@{self.hit}"

    @property
    def victim(self) -> str:
        """The process that fails: the first of its role. One of several requests at once reaches it."""
        return VICTIMS[POINTS[self.point].who]

    @property
    def setting(self) -> str:
        """The value of PDSERVE_FAILPOINTS."""
        action = f"delay:{DELAY_S}" if self.action == "delay" else self.action
        return f"{self.point}={action}@{self.hit}"

    @property
    def max_tokens(self) -> int:
        """Tokens of each answer. Without a scheduler the instances must not finish by themselves first."""
        return LONG_TOKENS if self.victim == "scheduler" and self.action in ("kill9", "stop") else MAX_TOKENS

    @property
    def outcomes(self) -> frozenset[str]:
        """The allowed outcomes of a request. With a second pair alive no fault of an instance is visible."""
        if self.victim == "scheduler" and self.action in ("kill9", "stop"):
            return frozenset({CLOSED} if self.action == "kill9" else {ANSWER, ERROR})
        return frozenset({ANSWER})


CASES = tuple(
    Case(point, hit, action)
    for point in POINTS
    for hit in HITS.get(point, (1,))
    for action in POINTS[point].actions
)  # fmt: skip
