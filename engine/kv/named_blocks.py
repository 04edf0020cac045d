"""The named blocks of a pool, and those of them without references, least recently used first. Not locked.

named, in use --rest--> named, idle --wake--> named, in use
                             |
                             +--evict--> no name
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.prefix import BlockName


class NamedBlocks:
    """Owner of the names of one pool's blocks; mutable, locked by its caller.

    In eviction order an idle block comes after all its idle descendants: the leaves of a chain are evicted first.
    """

    def __init__(self) -> None:
        self._block_by_digest: dict[bytes, int] = {}
        self._name_by_block: dict[int, BlockName] = {}
        self._decoded: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Named blocks without references."""
        return len(self._idle)

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Return the blocks of the longest leading part of `names`."""
        found: list[int] = []
        for name in names:
            block_id = self._block_by_digest.get(name.digest)
            if block_id is None or self._name_by_block[block_id] != name:
                break
            found.append(block_id)
        return found

    def put(self, block_id: int, name: BlockName, *, is_decoded: bool) -> bool:
        """Name a block in use and return True, unless it already has a name or another block has this name."""
        if name.digest in self._block_by_digest or block_id in self._name_by_block:
            return False
        self._block_by_digest[name.digest] = block_id
        self._name_by_block[block_id] = name
        if is_decoded:
            self._decoded.add(block_id)
        return True

    def is_decoded(self, block_id: int) -> bool:
        """Return whether the block has outputs."""
        return block_id in self._decoded

    def has_name(self, block_id: int) -> bool:
        """Return whether the block has a name."""
        return block_id in self._name_by_block

    def is_idle(self, block_id: int) -> bool:
        """Return whether the block has a name and no references."""
        return block_id in self._idle

    def wake(self, block_id: int) -> None:
        """Mark the block as in use again."""
        self._idle.pop(block_id, None)

    def rest(self, block_ids: Sequence[int]) -> None:
        """Mark these named blocks, in the order of their tokens, as idle."""
        for block_id in block_ids:
            self._idle[block_id] = None
        moved: set[int] = set()
        for block_id in reversed(block_ids):
            if block_id not in moved:
                moved.update(self._move_behind(block_id))

    def evict(self) -> int:
        """Remove the name of the least recently used idle block and return the block."""
        block_id, _ = self._idle.popitem(last=False)
        del self._block_by_digest[self._name_by_block.pop(block_id).digest]
        self._decoded.discard(block_id)
        return block_id

    def check(self) -> None:
        """Assert that names and blocks match, and that leaves are evicted before their parents."""
        assert self._block_by_digest == {name.digest: block for block, name in self._name_by_block.items()}
        assert self._idle.keys() <= self._name_by_block.keys(), "an idle block has no name"
        assert self._decoded <= self._name_by_block.keys(), "a block without a name is marked as decoded"
        order = {block_id: place for place, block_id in enumerate(self._idle)}
        for block_id, place in order.items():
            parent = self._block_by_digest.get(self._name_by_block[block_id].parent)
            assert parent not in order or place < order[parent], f"block {parent} is evicted before its leaf {block_id}"

    def _move_behind(self, block_id: int) -> list[int]:
        """Move the block, then its idle ancestors, to the end of the eviction order; return all blocks visited."""
        visited: list[int] = []
        at: int | None = block_id
        while at is not None:
            visited.append(at)
            if at in self._idle:
                self._idle.move_to_end(at)
            at = self._block_by_digest.get(self._name_by_block[at].parent)
        return visited
