"""The prompt prefixes that one instance has probably cached.

Placement prefers an instance that has a prompt's prefix, and a reservation there shares the blocks of the prefix.

digest = sha256(salt | all tokens up to here, each 64 followed by the images among them), one every 64 tokens
chain  = the digests of one prompt, first to last

Each tenant has its own salt, so tenants share no digest. All of this is an estimate: the instance evicts by its own
rules and does not report it. The estimate is dropped when the session ends.
"""

import bisect
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from wire.prompt_images import marks_within
from wire.types import PromptImage

DIGEST_TOKENS = 64
_DIGEST_BYTES = 16

Chain = tuple[bytes, ...]


def chain_of(token_ids: Sequence[int], salt: str, images: Sequence[PromptImage] = ()) -> Chain:
    """Return the digests of a prompt; none for fewer than 64 tokens."""
    named, ids = salt.encode(), memoryview(array("I", token_ids)).cast("B")
    hasher = hashlib.sha256(len(named).to_bytes(4, "little") + named)
    digests: list[bytes] = []
    size = len(ids) // len(token_ids) * DIGEST_TOKENS if token_ids else 1
    for end in range(size, len(ids) + 1, size):
        hasher.update(ids[end - size : end])
        if images:
            last = end // size * DIGEST_TOKENS
            hasher.update(marks_within(images, last - DIGEST_TOKENS, last))
        digests.append(hasher.copy().digest()[:_DIGEST_BYTES])
    return tuple(digests)


class Prefixes:
    """Prefixes computed on or sent to one instance, least recently used evicted first, and those in use there now.

    The last digests of a chain are evicted first, so a known one has all its predecessors.
    """

    def __init__(self, num_tokens: int) -> None:
        """Keep as many digests as fit the instance's pool of `num_tokens` tokens."""
        self._max_known = max(1, num_tokens // DIGEST_TOKENS)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._running: dict[str, Chain] = {}
        self._users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Return the number of known digests."""
        return len(self._known)

    def note(self, chain: Chain) -> None:
        """Record that the instance has the KV of the whole chain."""
        for digest in reversed(chain):
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def run(self, prompt_id: str, chain: Chain) -> None:
        """Record that the instance has the KV of the chain, used until `end` by a prompt that generates there."""
        self.note(chain)
        self.end(prompt_id)
        self._running[prompt_id] = chain
        self._users.update(chain)

    def runs(self, prompt_id: str) -> bool:
        """Return whether the prompt is generating on the instance: `run` without `end`."""
        return prompt_id in self._running

    def end(self, prompt_id: str) -> None:
        """Record that the prompt no longer generates on the instance. Idempotent."""
        for digest in self._running.pop(prompt_id, ()):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]

    def may_have(self, chain: Chain) -> bool:
        """Whether `tokens_known` or `tokens_running` is not 0: few instances in a large cluster need the numbers."""
        return chain[0] in self._known or chain[0] in self._users

    def tokens_known(self, chain: Chain) -> int:
        """Return how many leading tokens the instance has probably cached."""
        return _matched_tokens(chain, self._known.__contains__)

    def tokens_running(self, chain: Chain) -> int:
        """Return how many leading tokens a prompt generating there also has: their blocks are shared."""
        return _matched_tokens(chain, self._users.__contains__)


def _matched_tokens(chain: Chain, has: Callable[[bytes], bool]) -> int:
    return DIGEST_TOKENS * bisect.bisect_left(chain, True, key=lambda digest: not has(digest))
