"""The complete hand-off as a scheduler sees it: two instances with the fake engine, and this process as scheduler.

    here --Reserve--> D --Reserved--> here --Prefill--> P computes, sends, gets D's ack --HandedOff--> here

This includes two gRPC round trips and the fake engine's arithmetic; the clock is this process's.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.kv.rounds import print_progress
from benchmarks.kv.table import Row
from pdserve.layout import ClusterShape, environment, lay_out
from pdserve.ports import free_ports
from pdserve.processes import Child, stop
from pdserve.trust import trust_of
from ranktable_tools.launch_plan import resolve
from scheduler.config import SchedulerOptions
from scheduler.process import Cluster, cluster_of
from wire.connection import Session
from wire.errors import InstanceLost
from wire.messages import Event, Failed, HandedOff, OpenSession, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, SamplingParams

START_S, HAND_OFF_S, LEASE_S = 60.0, 20.0, 600.0
E = TypeVar("E")


def measure_whole(transport: str, tokens: int, hand_offs: int, limit_ms: float | None) -> Iterator[Row]:
    """Yield the row of `transport`. Raises RuntimeError if the instances do not start."""
    print_progress(f"{transport}: {hand_offs} prompts of {tokens} tokens through two fake instances")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
        (port,) = free_ports(1)
        shape = ClusterShape(1, 1, "127.0.0.1", port, ("--engine", "fake", "--kv-transport", transport))
        *instances, scheduler = lay_out(shape, folder / "tables")
        environ = environment(scheduler, os.environ)
        plan = resolve(environ)
        cluster = cluster_of(plan, trust_of(plan, environ), SchedulerOptions())
        children = [Child(one, folder / f"{one.name}.log", os.environ) for one in instances]
        stack.callback(lambda: stop([child.record for child in children]))
        seconds = asyncio.run(_hand_over(cluster, children, tokens, hand_offs))
    measure = f"{transport}, {tokens} tokens, reserve to ack, two fake instances over gRPC, median of {hand_offs}"
    yield Row(measure, "ms", 1e3 * median(seconds), goal=limit_ms, at_least=False)


async def _hand_over(cluster: Cluster, children: list[Child], tokens: int, hand_offs: int) -> list[float]:
    loop, seconds = asyncio.get_running_loop(), []
    async with AsyncExitStack() as stack:
        prefill, decode = [await _open(stack, cluster, index, children) for index in range(2)]
        from_prefill, from_decode = prefill.events(), decode.events()
        for number in range(hand_offs + 10):  # the first ones open the link
            ids = tuple(1 + (number * 31 + i) % 900 for i in range(tokens))
            prompt = PromptState(
                f"bench-{number}", f"bench-{number}", ids, SamplingParams(max_tokens=2, temperature=0.0)
            )
            began = loop.time()
            await decode.send(Reserve(prompt))
            reserved = await _next(from_decode, Reserved)
            await prefill.send(Prefill(prompt, reserved.ticket))
            await _next(from_prefill, HandedOff)
            if number >= 10:
                seconds.append(loop.time() - began)
            step = await _next(from_decode, Step)
            while not any(token.finish for token in step.tokens):
                step = await _next(from_decode, Step)
    return seconds


async def _open(stack: AsyncExitStack, cluster: Cluster, index: int, children: list[Child]) -> Session:
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        connection = cluster.connect(cluster.expected[index].address)
        try:
            session = await connection.open(OpenSession("kv-bench", 1, LEASE_S), 5.0)
            break
        except InstanceLost:
            await connection.close()
            ends = [end for child in children if (end := child.ended()) is not None]
            if ends or asyncio.get_running_loop().time() > deadline:
                raise RuntimeError("; ".join(ends) or f"no session with instance {index} in {START_S} s") from None
            await asyncio.sleep(0.1)
    stack.push_async_callback(connection.close)
    stack.push_async_callback(session.close)
    return session


async def _next(events: AsyncIterator[Event], kind: type[E]) -> E:
    async with asyncio.timeout(HAND_OFF_S):
        while True:
            event = await anext(events)
            if isinstance(event, kind):
                return event
            if isinstance(event, Failed | Refused):
                raise RuntimeError(f"{event.error}: {event.message}")
