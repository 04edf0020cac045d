"""What a prompt takes of its tenant's share: its tokens, and the output that this tenant's prompts usually make."""

from scheduler.load.loads import PromptFacts

_FIRST_GUESS = 256
_WEIGHT = 1 / 16


class PromptCosts:
    """Owns what each tenant's sequences made on average, the last ones counting most.

    Limits say little: clients leave `max_tokens` at what the model can. So what was made is learned where it ended.
    """

    def __init__(self) -> None:
        self._output: dict[str, float] = {}

    def cost(self, tenant: str, facts: PromptFacts) -> int:
        """Return the tokens to expect of a prompt, its own and those of all its sequences."""
        if facts.pooled:
            return facts.num_tokens
        output = min(facts.max_tokens, self._output.get(tenant, _FIRST_GUESS))
        return facts.num_tokens + facts.num_sequences * max(1, round(output))

    def ended(self, tenant: str, facts: PromptFacts, num_output_tokens: int) -> None:
        """A prompt was granted and has ended, in whatever way, after so many tokens of all its sequences."""
        if not facts.pooled:
            before = self._output.get(tenant, float(_FIRST_GUESS))
            self._output[tenant] = before + _WEIGHT * (num_output_tokens / facts.num_sequences - before)
