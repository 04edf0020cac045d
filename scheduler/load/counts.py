"""Numbers by prompt with a running total, so that placement need not sum them every time."""


class PromptCounts:
    """Owner of the numbers; a missing one counts as 0."""

    def __init__(self) -> None:
        self.total = 0
        self._numbers: dict[str, int] = {}

    def __contains__(self, prompt_id: str) -> bool:
        """Return whether the prompt has a number."""
        return prompt_id in self._numbers

    def of(self, prompt_id: str) -> int:
        """Return the prompt's number."""
        return self._numbers.get(prompt_id, 0)

    def set(self, prompt_id: str, number: int) -> None:
        """Set the prompt's number, replacing an earlier one."""
        self.total += number - self._numbers.get(prompt_id, 0)
        self._numbers[prompt_id] = number

    def drop(self, prompt_id: str) -> int:
        """Remove the prompt's number and return it. Idempotent."""
        number = self._numbers.pop(prompt_id, 0)
        self.total -= number
        return number
