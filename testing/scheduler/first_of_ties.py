"""A source of chance for tests that must know which of several equal instances serves."""

import random


class FirstOfTies(random.Random):
    """Draws the first of ties, and the mean of a range."""

    def random(self) -> float:
        """Return 0."""
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        """Return the mean."""
        return (a + b) / 2
