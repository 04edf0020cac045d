"""Learn what a step costs from the steps of an engine, with more weight on recent ones. Pure.

    seconds = base + sequence x sequences decoded                      steps without a prompt's chunk
    seconds = the above sum + token x prompt tokens in chunks          the other steps

The two are learned separately, so that an instance that seldom computes prompts does not forget what they cost.
"""

from dataclasses import dataclass

from wire.step_cost import StepCost

_KEPT = 0.98
"""The factor on a step's weight for each later step of its kind: about the last 50 steps count."""
_OUTLIER = 4.0
"""A step's time counts as at most this many times the expected time: the process may have been kept from running."""
_LEAST_SPREAD = 0.1
"""The least standard deviation of the number of sequences, relative to its mean, that shows what one of them costs."""
_DOUBT = 2.0
"""Divided by the number of steps measured, this is added to the variance: the first few may differ by chance."""


@dataclass(slots=True)
class _Decodes:
    """Weighted sums over the steps without chunks, x sequences and y seconds each."""

    weight: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    slope: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight = _KEPT * self.weight + 1
        self.x, self.xx = _KEPT * self.x + x, _KEPT * self.xx + x * x
        self.y, self.xy = _KEPT * self.y + y, _KEPT * self.xy + x * y
        mean, spread = self.x / self.weight, self.xx / self.weight - (self.x / self.weight) ** 2
        if spread > (_LEAST_SPREAD * mean) ** 2:
            slope = (self.xy - mean * self.y) / (self.weight * spread + _DOUBT)
            self.slope = min(max(0.0, slope), self.y / self.x)  # neither part of the cost is below 0

    @property
    def base(self) -> float:
        return max(0.0, (self.y - self.slope * self.x) / self.weight) if self.weight else 0.0


class StepCosts:
    """Owner of one engine's measured costs, and of the longest chunk among them, in tokens.

    One thread measures; any may read `now`.
    """

    def __init__(self) -> None:
        self.now = StepCost()
        self.longest_chunk = 0
        self._decodes = _Decodes()
        self._tokens = self._chunk_s = 0.0

    def measure(self, num_sequences: int, num_chunk_tokens: int, seconds: float) -> None:
        """Learn from a step that decoded `num_sequences` sequences beside `num_chunk_tokens` tokens of chunks."""
        decodes = self._decodes
        if expected_s := self._expected_s(num_sequences, num_chunk_tokens):
            seconds = min(seconds, _OUTLIER * expected_s)
        if not num_chunk_tokens:
            decodes.add(num_sequences, seconds)
        else:
            self.longest_chunk = max(self.longest_chunk, num_chunk_tokens)
            rest_s = max(0.0, seconds - self.now.decode_s(num_sequences))
            self._tokens = _KEPT * self._tokens + num_chunk_tokens * num_chunk_tokens
            self._chunk_s = _KEPT * self._chunk_s + num_chunk_tokens * rest_s
        token_s = self._chunk_s / self._tokens if self._tokens else 0.0
        self.now = StepCost(decodes.base, decodes.slope, token_s)

    def _expected_s(self, num_sequences: int, num_chunk_tokens: int) -> float:
        """Return the seconds that such a step takes; 0 if one of the costs is not known."""
        known, now = not num_sequences or self._decodes.weight, self.now
        if not known or (num_chunk_tokens and not now.token_s):
            return 0.0
        return now.decode_s(num_sequences) + num_chunk_tokens * now.token_s
