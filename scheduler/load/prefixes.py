"""Which prompts' beginnings one instance is likely to hold: what placement prefers, and what a reservation shares.

link  = sha256(salt | all tokens up to here), every 64 tokens: tenants have none in common
chain = the links of one prompt, first to last

A guess: the instance evicts by its own rules and does not tell. It is forgotten with the session, so with the epoch.
"""

import bisect
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

LINK_TOKENS = 64
_DIGEST_BYTES = 16

Chain = tuple[bytes, ...]


def chain_of(token_ids: Sequence[int], salt: str) -> Chain:
    """Return the links of a prompt; none for one of fewer than 64 tokens."""
    named, ids = salt.encode(), memoryview(array("I", token_ids)).cast("B")
    hasher, links = hashlib.sha256(len(named).to_bytes(4, "little") + named), list[bytes]()
    size = len(ids) // len(token_ids) * LINK_TOKENS if token_ids else 1
    for end in range(size, len(ids) + 1, size):
        hasher.update(ids[end - size : end])
        links.append(hasher.copy().digest()[:_DIGEST_BYTES])
    return tuple(links)


class Prefixes:
    """What was computed on or sent to one instance, the least recently used forgotten, and what runs there now.

    Of each chain the last links go first, so that a link which is known has all links before it.
    """

    def __init__(self, num_tokens: int) -> None:
        """Keep as many links as `num_tokens` tokens, the instance's whole pool, can have."""
        self._most = max(1, num_tokens // LINK_TOKENS)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._running: dict[str, Chain] = {}
        self._users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Links known."""
        return len(self._known)

    def note(self, chain: Chain) -> None:
        """The instance has the KV of all these tokens now."""
        for link in reversed(chain):
            self._known[link] = None
            self._known.move_to_end(link)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def run(self, prompt_id: str, chain: Chain) -> None:
        """The instance has that KV, and a prompt that generates there holds it until `end`."""
        self.note(chain)
        self.end(prompt_id)
        self._running[prompt_id] = chain
        self._users.update(chain)

    def runs(self, prompt_id: str) -> bool:
        """Whether the prompt generates there, or has and was not ended yet."""
        return prompt_id in self._running

    def end(self, prompt_id: str) -> None:
        """The prompt generates there no more. Idempotent."""
        for link in self._running.pop(prompt_id, ()):
            self._users[link] -= 1
            if not self._users[link]:
                del self._users[link]

    def tokens_known(self, chain: Chain) -> int:
        """Return how many leading tokens the instance is likely to hold."""
        return _length(chain, self._known.__contains__)

    def tokens_running(self, chain: Chain) -> int:
        """Return how many leading tokens are those of a prompt that generates there: their blocks are shared."""
        return _length(chain, self._users.__contains__)


def _length(chain: Chain, has: Callable[[bytes], bool]) -> int:
    return LINK_TOKENS * bisect.bisect_left(chain, True, key=lambda link: not has(link))
