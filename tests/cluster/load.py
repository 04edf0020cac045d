"""Clients that send requests continuously, and the limits of a cluster within which each request has to end."""

import asyncio

import httpx

from tests.faults.cases import ANSWER, ERROR
from tests.faults.stream_request import StreamResult, request_stream

NUM_CLIENTS, MAX_TOKENS = 6, 40
FIRST_TOKEN_S, STALL_S, BUSY_S = 20, 10, 15
PHASE_S = 90.0
LIMITS = (f"--first-token-timeout={FIRST_TOKEN_S}", f"--stall-timeout={STALL_S}", "--prefill-chunk-size=32")


class Load:
    """Clients that send their own prompt again and again until stopped. Owns the results, by client."""

    def __init__(self, http: httpx.AsyncClient, stall_s: int) -> None:
        self.results: list[list[StreamResult]] = [[] for _ in range(NUM_CLIENTS)]
        self._deadline_s = FIRST_TOKEN_S + stall_s + BUSY_S
        self._http, self._stopped, self._ending = http, False, asyncio.Event()

    async def client(self, number: int) -> None:
        """Run one of them; a request that ends later than the cluster's limits allow is a failure."""
        prompt = [3 + (11 * number + 5 * at) % 200 for at in range(90)]
        while not self._stopped:
            async with asyncio.timeout(self._deadline_s):
                self.results[number].append(await request_stream(self._http, prompt, MAX_TOKENS))
            self._ending.set()

    async def each(self, num_answers: int, num_errors: int = 0) -> None:
        """Return when each client has seen that many more outcomes of each kind."""
        before = [len(one) for one in self.results]
        async with asyncio.timeout(PHASE_S):
            for start, one in zip(before, self.results, strict=True):
                while _count(one[start:], ANSWER) < num_answers or _count(one[start:], ERROR) < num_errors:
                    await self._wait_for_end()

    async def _wait_for_end(self) -> None:
        self._ending.clear()
        await self._ending.wait()

    def stop(self) -> None:
        """Stop each client after its current request."""
        self._stopped = True


def _count(results: list[StreamResult], ending: str) -> int:
    return sum(one.outcome == ending for one in results)
