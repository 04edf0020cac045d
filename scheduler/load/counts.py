"""Numbers by prompt and their sum, kept as they change: what is asked for at every placement is not added up anew."""


class PromptCounts:
    """Owns the numbers; one that is not there counts as 0."""

    def __init__(self) -> None:
        self.total = 0
        self._numbers: dict[str, int] = {}

    def __contains__(self, prompt_id: str) -> bool:
        """Whether the prompt has a number."""
        return prompt_id in self._numbers

    def of(self, prompt_id: str) -> int:
        """Return the prompt's number."""
        return self._numbers.get(prompt_id, 0)

    def set(self, prompt_id: str, number: int) -> None:
        """Give the prompt this number instead of the one it had."""
        self.total += number - self._numbers.get(prompt_id, 0)
        self._numbers[prompt_id] = number

    def drop(self, prompt_id: str) -> int:
        """Take the prompt's number out and return it. Idempotent."""
        number = self._numbers.pop(prompt_id, 0)
        self.total -= number
        return number
