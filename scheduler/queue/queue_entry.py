"""One prompt's place in the queue of the cluster."""

import asyncio

from scheduler.grants import Grant
from scheduler.load.loads import PromptFacts


class QueueEntry:
    """A waiting prompt. `turn` counts the prompts of its own request before it; a lower `priority` runs earlier.

    `cost` is its charge against its tenant's share, in tokens, set when it is queued; `num_overtaken` counts the
    later prompts that were granted while there was no room for this one.
    """

    def __init__(
        self, prompt_id: str, facts: PromptFacts, turn: int = 0, *, tenant: str = "", priority: int = 0
    ) -> None:
        self.prompt_id = prompt_id
        self.facts = facts
        self.turn = turn
        self.tenant = tenant
        self.priority = priority
        self.cost = facts.num_tokens
        self.num_overtaken = 0
        self.grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
