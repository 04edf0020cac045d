"""Processes that are starved but live: a duty cycle of SIGSTOP, and clients that keep a cluster busy meanwhile."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.faults.cases import ANSWER
from tests.faults.stream_request import StreamResult, request_stream

PROMPT_LENGTHS = (32, 96, 160, 256)
MAX_TOKENS = 32
NUM_CLIENTS = 3
STOPPED_S, RUNNING_S = 0.9, 0.1
ANSWER_S = 300.0


@dataclass
class Traffic:
    """What the clients saw: every answer by its prompt's length, and everything that was not a complete answer."""

    answers: dict[int, set[str]] = field(default_factory=dict)
    failures: list[StreamResult] = field(default_factory=list)
    num_answers: int = 0

    def take(self, length: int, result: StreamResult) -> None:
        """Count one request."""
        if result.outcome != ANSWER or result.num_tokens != MAX_TOKENS:
            self.failures.append(result)
            return
        self.num_answers += 1
        self.answers.setdefault(length, set()).add(result.text)


def prompt_of(length: int) -> list[int]:
    """Return the token ids of one prompt; no two lengths share a prefix."""
    return [3 + (7 * length + 5 * place) % 300 for place in range(length)]


async def keep_busy(base_url: str, until_s: float) -> Traffic:
    """Run `NUM_CLIENTS` clients until time.monotonic() is `until_s`, each request to its end, one of every prompt."""
    traffic = Traffic()
    client = httpx.AsyncClient(base_url=base_url, timeout=ANSWER_S, trust_env=False)
    async with client, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(_one_client(client, number, until_s, traffic))
    return traffic


async def _one_client(client: httpx.AsyncClient, number: int, until_s: float, traffic: Traffic) -> None:
    for turn in itertools.count():
        if turn >= len(PROMPT_LENGTHS) and time.monotonic() >= until_s:
            return
        length = PROMPT_LENGTHS[(turn + number) % len(PROMPT_LENGTHS)]
        traffic.take(length, await request_stream(client, prompt_of(length), MAX_TOKENS))


async def starve(pids: Sequence[int], until_s: float) -> None:
    """Let the processes run a tenth of each second until time.monotonic() is `until_s`; they run when it returns."""
    try:
        while time.monotonic() < until_s:
            _send(pids, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            _send(pids, signal.SIGCONT)
            await asyncio.sleep(RUNNING_S)
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)
