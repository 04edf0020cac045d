"""The cost of a prompt for its tenant's share: its tokens and the tenant's usual output."""

from scheduler.load.loads import PromptFacts

_FIRST_GUESS = 256
_WEIGHT = 1 / 16


class PromptCosts:
    """Owner of each tenant's average output per sequence, weighted towards recent ones.

    `max_tokens` is not a usable estimate, because many clients leave it at the model's maximum.
    """

    def __init__(self) -> None:
        self._output: dict[str, float] = {}

    def cost(self, tenant: str, facts: PromptFacts) -> int:
        """Return the expected tokens of a prompt, its own and those of all its sequences."""
        if facts.pooled:
            return facts.num_tokens
        return facts.num_tokens + facts.num_sequences * max(1, round(self.expected_outputs(tenant, facts)))

    def expected_outputs(self, tenant: str, facts: PromptFacts) -> float:
        """Return the output tokens to expect of each sequence of a prompt."""
        return min(facts.max_tokens, self._output.get(tenant, _FIRST_GUESS))

    def ended(self, tenant: str, facts: PromptFacts, num_output_tokens: int) -> None:
        """Learn from a granted prompt that ended for any reason; `num_output_tokens` counts all its sequences."""
        if not facts.pooled:
            before = self._output.get(tenant, float(_FIRST_GUESS))
            self._output[tenant] = before + _WEIGHT * (num_output_tokens / facts.num_sequences - before)
