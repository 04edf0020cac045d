"""Memory is returned to the system when nothing runs, and only if there is some to return."""

import asyncio
import json
import subprocess
import sys
from collections import deque

from scheduler.memory import give_back_memory
from tests.scheduler.virtual_time import virtual

MIB = 2**20


class _Process:
    """The memory figures of a process, one for each check."""

    def __init__(self, *resident_mib: int) -> None:
        self.resident_mib = deque(resident_mib)
        self.released: list[int] = []
        self.idle = True

    def resident(self) -> int:
        return self.resident_mib[0] * MIB

    def release(self) -> None:
        self.released.append(self.resident_mib[0])
        self.resident_mib[0] -= 50

    async def live(self) -> None:
        """Check once for each of the figures."""
        keeping = asyncio.create_task(give_back_memory(lambda: self.idle, resident=self.resident, release=self.release))
        await asyncio.sleep(1.0)
        while len(self.resident_mib) > 1:
            self.resident_mib.popleft()
            await asyncio.sleep(2.0)
        keeping.cancel()


@virtual
async def test_it_returns_memory_once_it_has_grown() -> None:
    process = _Process(100, 110, 131, 133, 90, 100)
    await process.live()

    assert process.released == [133]


@virtual
async def test_it_waits_until_nothing_runs() -> None:
    process = _Process(100, 300)
    process.idle = False
    await process.live()

    assert process.released == []


@virtual
async def test_memory_that_cannot_be_returned_is_not_retried() -> None:
    process = _Process(100, 300, 250, 251, 281, 283)
    await process.live()

    assert process.released == [300, 283]


# In its own process: memory that a process already holds free would be used again without growth.
_FREEING = """
import json
from scheduler.memory import release_free, resident_bytes
release_free()
before = resident_bytes()
blocks = [bytes([n % 256]) * 100_000 for n in range(1000)]  # below the size that the C library maps apart
keep = [blocks[-1]]
held = resident_bytes()
del blocks
release_free()
print(json.dumps([before, held, resident_bytes()]))
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    ran = subprocess.run([sys.executable, "-c", _FREEING], capture_output=True, text=True, timeout=300.0, check=True)
    before, held, after = json.loads(ran.stdout)

    assert held > before + 80 * MIB
    assert after < before + 20 * MIB
