"""The swap area's accounting: which slot has the copy of which block, for how many sequences.

The model owns the bytes. A block shared by two sequences is copied once, and a named one is not copied if the
area already has another prompt's copy of it.
"""

import heapq
from collections.abc import Mapping, Sequence

from engine.prefix import BlockName
from engine.step import Model


class SwapArea:
    """Owner of the slots that fit in `num_bytes`. Mutable, used by the engine's thread."""

    def __init__(self, model: Model, num_bytes: int) -> None:
        layout = model.info.layout
        self.num_slots = num_bytes // (layout.token_bytes * layout.block_size)
        self._model = model
        self._freed: list[int] = []  # a heap: low slots, which already have memory, are used first
        self._num_touched = 0
        self._references: dict[int, int] = {}
        self._slot_by_digest: dict[bytes, int] = {}
        self._name_by_slot: dict[int, BlockName] = {}

    @property
    def num_used(self) -> int:
        """Slots in use. Safe from any thread."""
        return len(self._references)

    def save(self, names: Mapping[int, BlockName | None]) -> "dict[int, int] | None":
        """Copy these blocks, given with their names or None; return the slot of each.

        Blocks with equal names share one slot, with a reference for each. Returns None, with nothing copied, if there
        are too few slots.
        """
        first = _first_of_each_name(names)
        known = {block_id: self._slot_of(names[block_id]) for block_id in dict.fromkeys(first.values())}
        fresh = [block_id for block_id, slot in known.items() if slot is None]
        if self.num_used + len(fresh) > self.num_slots:
            return None
        copies = dict(zip(fresh, self._take(len(fresh)), strict=True))
        held = {block_id: copies[block_id] if slot is None else slot for block_id, slot in known.items()}
        slots = {block_id: held[first[block_id]] for block_id in names}
        self.retain(list(slots.values()))
        try:
            self._model.save_blocks(list(copies), list(copies.values()))
        except BaseException:
            self.release(list(slots.values()))
            raise
        for block_id, slot in copies.items():
            self._name(slot, names[block_id])
        return slots

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots back into blocks."""
        self._model.load_blocks(slots, block_ids)

    def retain(self, slots: Sequence[int]) -> None:
        """Add one reference to each."""
        for slot in slots:
            self._references[slot] = self._references.get(slot, 0) + 1

    def release(self, slots: Sequence[int]) -> None:
        """Drop one reference to each; the last one frees the slot."""
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                del self._references[slot]
                heapq.heappush(self._freed, slot)
                name = self._name_by_slot.pop(slot, None)
                if name is not None:
                    del self._slot_by_digest[name.digest]

    def check(self) -> None:
        """Assert that every slot is either held or free, and that names and slots match."""
        held = set(self._references)
        assert not held & set(self._freed), "a slot is held and free at once"
        assert held | set(self._freed) == set(range(self._num_touched)), "a slot is lost"
        assert self._num_touched <= self.num_slots
        assert all(count > 0 for count in self._references.values())
        assert self._name_by_slot.keys() <= held
        assert self._slot_by_digest == {name.digest: slot for slot, name in self._name_by_slot.items()}

    def _slot_of(self, name: BlockName | None) -> int | None:
        """Return the slot with that name; token ids are compared too, not only the digest."""
        slot = None if name is None else self._slot_by_digest.get(name.digest)
        return slot if slot is not None and self._name_by_slot[slot] == name else None

    def _take(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count:
            if self._freed:
                slots.append(heapq.heappop(self._freed))
            else:
                slots.append(self._num_touched)
                self._num_touched += 1
        return slots

    def _name(self, slot: int, name: BlockName | None) -> None:
        """Name the slot, unless another slot has the same digest."""
        if name is not None and name.digest not in self._slot_by_digest:
            self._slot_by_digest[name.digest] = slot
            self._name_by_slot[slot] = name


class SavedBlocks:
    """The slots of one sequence's blocks, in the order of its tokens; it has a reference to each until `release`."""

    __slots__ = ("_area", "slots")

    def __init__(self, area: SwapArea, slots: Sequence[int]) -> None:
        self._area, self.slots = area, tuple(slots)
        area.retain(slots)

    def release(self) -> None:
        """Release the slots. Idempotent."""
        slots, self.slots = self.slots, ()
        self._area.release(slots)


def _first_of_each_name(names: Mapping[int, BlockName | None]) -> dict[int, int]:
    """Map each block to the first with the same name: two sequences with equal tokens have blocks of equal names."""
    first: dict[BlockName, int] = {}
    return {
        block_id: block_id if name is None else first.setdefault(name, block_id) for block_id, name in names.items()
    }
