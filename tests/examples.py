"""How many examples hypothesis draws for a test: a third in `scripts/test`, all under `--all`."""

import os

from hypothesis import settings


def num_examples(count: int) -> int:
    """Return how many of `count` examples this run draws."""
    return count if os.environ.get("PDSERVE_TEST_ALL") else -(-count // 3)


def examples(count: int, *, steps: int = 50) -> settings:
    """Return the settings of a test, or of a state machine whose examples have up to so many steps."""
    return settings(max_examples=num_examples(count), stateful_step_count=steps)
