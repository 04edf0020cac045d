"""The queue's capacity: how much each tenant uses, and whether more fits."""

from collections import Counter

from scheduler.finished_requests import OF_PROMPTS, OF_TOKENS
from scheduler.limits import ControlLimits


class QueueRoom:
    """Owner of the counts of waiting prompts and tokens. With several tenants, each must leave room for the others.

    A tenant with waiting prompts may add more only while at least as much room is left as it then uses: one tenant
    alone can fill half of the queue, two a third each, and there is always room for a new tenant.
    """

    def __init__(self, limits: ControlLimits) -> None:
        self._limits = limits
        self._prompts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self.num_prompts = 0
        self.num_tokens = 0

    def take(self, tenant: str, num_tokens: int) -> None:
        """Count a prompt that starts waiting."""
        self._count(tenant, 1, num_tokens)

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """Count a prompt that stops waiting."""
        self._count(tenant, -1, -num_tokens)
        if not self._prompts[tenant]:
            del self._prompts[tenant], self._tokens[tenant]

    def refusal(self, tenant: str, num_prompts: int, num_tokens: int) -> tuple[str, str] | None:
        """Return why these prompts cannot wait and the limit exceeded, None if they can. An empty queue accepts all."""
        prompts, tokens = self.num_prompts + num_prompts, self.num_tokens + num_tokens
        max_prompts, most_tokens = self._limits.max_queued_requests, self._limits.max_queued_tokens
        if not self.num_prompts:
            return None
        if prompts > max_prompts or tokens > most_tokens:
            message = (
                f"the queue is full: with this request {prompts} prompts (limit {max_prompts}) and {tokens} prompt "
                f"tokens (limit {most_tokens}) would wait"
            )
            return message, OF_PROMPTS if prompts > max_prompts else OF_TOKENS
        if self._limits.num_tenants == 1 or tenant not in self._prompts:
            return None
        own_prompts, own_tokens = self._prompts[tenant] + num_prompts, self._tokens[tenant] + num_tokens
        if own_prompts <= max_prompts - prompts and own_tokens <= most_tokens - tokens:
            return None
        message = (
            f"this key's share of the queue is full: with this request {own_prompts} prompts and {own_tokens} prompt "
            f"tokens would wait, but only {max_prompts - prompts} and {most_tokens - tokens} would be left for others"
        )
        return message, OF_PROMPTS if own_prompts > max_prompts - prompts else OF_TOKENS

    def _count(self, tenant: str, num_prompts: int, num_tokens: int) -> None:
        self._prompts[tenant] += num_prompts
        self._tokens[tenant] += num_tokens
        self.num_prompts += num_prompts
        self.num_tokens += num_tokens
