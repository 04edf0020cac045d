"""One data-parallel rank of a worker: its block pool, and the blocks it holds until a decode worker has read them.

A block keeps its bytes when it is freed, as memory does: a late read returns what lies there now, the old KV or
another prompt's.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from testing.vllm_worker.continuation import KvEntry

_LOOKS_AGAIN_S = 0.05  # a lease may run out while a request waits


@dataclass(slots=True)
class HeldPrefill:
    """Blocks of a finished prefill, until they are read or `expires_at`."""

    block_ids: list[int]
    expires_at: float


@dataclass(slots=True)
class Counts:
    """What a rank has counted since it started."""

    requests: dict[str, int] = field(default_factory=dict)  # finished, by reason
    computed_tokens: int = 0  # of prompts
    transferred_tokens: int = 0
    generation_tokens: int = 0
    failed_transfers: int = 0
    expired: int = 0
    reads_after_expiry: int = 0


class WorkerRank:
    """Owner of one rank's blocks. `clock` is monotonic."""

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        engine_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number, self.num_blocks, self.block_size = number, num_blocks, block_size
        self.engine_id = f"{engine_id or uuid.uuid4()}_dp{number}"
        self.counts = Counts()
        self.running = self.waiting = self.fetching = self.side_channel_port = 0
        self._max_num_seqs, self._clock = max_num_seqs, clock
        self._free = deque(range(1, num_blocks))  # block 0 is vLLM's null block
        self._memory: list[list[KvEntry]] = [[] for _ in range(num_blocks)]
        self._held: dict[str, HeldPrefill] = {}
        self.arrivals: dict[str, asyncio.Future[list[KvEntry]]] = {}
        self.registrations: dict[str, dict[str, Any]] = {}
        self.offers: dict[str, tuple[str, Sequence[KvEntry]]] = {}
        self.known_engines: set[str] = set()
        self.peers: dict[str, str] = {}
        self._prefixes: set[int] = set()
        self._freed = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def freeze(self) -> None:
        """Answer nothing and generate nothing from now on."""
        self._goes_on.clear()

    async def pause(self, seconds: float = 0.0) -> None:
        """Wait for that long, and then until the rank is not frozen."""
        if seconds:
            await asyncio.sleep(seconds)
        await self._goes_on.wait()

    def note_prompt(self, prompt: tuple[int, ...], salt: str) -> int:
        """Return how many of a prompt's tokens, in whole blocks and without the last token, began an earlier prompt."""
        digest, num_cached, size = hash(salt), 0, self.block_size
        for start in range(0, len(prompt) - size, size):
            digest = hash((digest, prompt[start : start + size]))
            if digest in self._prefixes and num_cached == start:
                num_cached += size
            self._prefixes.add(digest)
        return num_cached

    @property
    def kv_usage(self) -> float:
        """The share of the pool that is in use or held."""
        self._expire()
        return 1 - len(self._free) / (self.num_blocks - 1)

    @asynccontextmanager
    async def run(self, num_tokens: int) -> AsyncIterator[list[int]]:
        """Wait for a batch slot and for blocks; yield the blocks. Those still in the list at the end are freed."""
        count = self._blocks_of(num_tokens)
        self.waiting += 1
        try:
            while not self._has_room(count):
                self._freed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _LOOKS_AGAIN_S)
        finally:
            self.waiting -= 1
        block_ids = [self._free.popleft() for _ in range(count)]
        self.running += 1
        try:
            yield block_ids
        finally:
            self.running -= 1
            self._release(block_ids)

    async def receive(
        self, key: str, block_ids: list[int], request_kv: Callable[[], Awaitable[None]]
    ) -> list[KvEntry]:  # fmt: skip
        """Request the KV of a running prompt, and wait for it without a limit, in no batch slot.

        A prompt aborted meanwhile keeps its blocks until its KV is here (vllm.v1.core.sched, finish_requests).
        """
        arrival: asyncio.Future[list[KvEntry]] = asyncio.get_running_loop().create_future()
        self.arrivals[key] = arrival
        try:
            async with self._waiting_for_kv():
                await request_kv()
                kv = await asyncio.shield(arrival)
        except asyncio.CancelledError:
            kept, block_ids[:] = list(block_ids), []
            arrival.add_done_callback(lambda _: self._release(kept))
            arrival.add_done_callback(lambda _: self.arrivals.pop(key, None))
            raise
        except Exception:
            del self.arrivals[key]
            raise
        del self.arrivals[key]
        return kv

    @asynccontextmanager
    async def _waiting_for_kv(self) -> AsyncIterator[None]:
        """Count a request as vLLM does (WAITING_FOR_REMOTE_KVS), and in the end wait for a batch slot again."""
        self.running, self.waiting, self.fetching = self.running - 1, self.waiting + 1, self.fetching + 1
        self._freed.set()
        try:
            try:
                yield
            finally:
                self.fetching -= 1
            while self.running >= self._max_num_seqs:
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.running, self.waiting = self.running + 1, self.waiting - 1

    def write(self, block_ids: Sequence[int], kv: Sequence[KvEntry]) -> None:
        """Store the KV of a prompt in its blocks."""
        for i, block_id in enumerate(block_ids):
            self._memory[block_id] = list(kv[i * self.block_size : (i + 1) * self.block_size])

    def hold(self, request_id: str, block_ids: list[int], num_tokens: int, lease_s: float) -> list[int]:
        """Take the prompt's blocks out of `block_ids` and hold them; return them."""
        count = self._blocks_of(num_tokens)
        held, block_ids[:] = block_ids[:count], block_ids[count:]
        self._held[request_id] = HeldPrefill(held, self._clock() + lease_s)
        return held

    def read(self, block_ids: Sequence[int]) -> list[KvEntry]:
        """Return what lies in these blocks now."""
        return [entry for block_id in block_ids for entry in self._memory[block_id]]

    def holds(self, request_id: str) -> bool:
        """Return whether the blocks of this request are still held."""
        self._expire()
        return request_id in self._held

    def end(self, request_id: str) -> None:
        """Free held blocks: they were read, or will not be."""
        if self.holds(request_id):
            self._release(self._held.pop(request_id).block_ids)
        else:
            self.counts.reads_after_expiry += 1

    def _has_room(self, count: int) -> bool:
        self._expire()
        return self.running < self._max_num_seqs and len(self._free) >= count

    def _expire(self) -> None:
        now = self._clock()
        for request_id in [key for key, held in self._held.items() if held.expires_at <= now]:
            self._release(self._held.pop(request_id).block_ids)
            self.counts.expired += 1

    def _release(self, block_ids: list[int]) -> None:
        self._free.extend(block_ids)
        block_ids.clear()
        self._freed.set()

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
