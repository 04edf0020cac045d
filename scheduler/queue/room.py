"""How much of the queue is taken, by whom, and whether more fits."""

from collections import Counter

from scheduler.limits import ControlLimits


class QueueRoom:
    """Owns the counts of what waits. Where there are several tenants, none takes what others may need.

    A tenant with something waiting may have as much more as leaves as much room as it then holds: one alone fills half
    of the queue, two a third each, and there is always room for one who comes anew.
    """

    def __init__(self, limits: ControlLimits) -> None:
        self._limits = limits
        self._prompts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self.num_prompts = 0
        self.num_tokens = 0

    def take(self, tenant: str, num_tokens: int) -> None:
        """A prompt of so many tokens waits now."""
        self._count(tenant, 1, num_tokens)

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """It waits no more."""
        self._count(tenant, -1, -num_tokens)
        if not self._prompts[tenant]:
            del self._prompts[tenant], self._tokens[tenant]

    def refusal(self, tenant: str, num_prompts: int, num_tokens: int) -> str | None:
        """Return in words why these cannot wait; None if they can. An empty queue takes anything."""
        prompts, tokens = self.num_prompts + num_prompts, self.num_tokens + num_tokens
        most_prompts, most_tokens = self._limits.max_queued_requests, self._limits.max_queued_tokens
        if not self.num_prompts:
            return None
        if prompts > most_prompts or tokens > most_tokens:
            return (
                f"the queue is full: with this request {prompts} prompts (limit {most_prompts}) and {tokens} prompt "
                f"tokens (limit {most_tokens}) would wait"
            )
        if self._limits.num_tenants == 1 or tenant not in self._prompts:
            return None
        own_prompts, own_tokens = self._prompts[tenant] + num_prompts, self._tokens[tenant] + num_tokens
        if own_prompts <= most_prompts - prompts and own_tokens <= most_tokens - tokens:
            return None
        return (
            f"this key's share of the queue is full: with this request {own_prompts} prompts and {own_tokens} prompt "
            f"tokens of it would wait, and room for {most_prompts - prompts} and {most_tokens - tokens} would be left"
        )

    def _count(self, tenant: str, num_prompts: int, num_tokens: int) -> None:
        self._prompts[tenant] += num_prompts
        self._tokens[tenant] += num_tokens
        self.num_prompts += num_prompts
        self.num_tokens += num_tokens
