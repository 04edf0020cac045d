"""One request, and an event that ends it in each turn of the event loop: it never leaves anything behind."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.tokens import Tokens
from simulation.virtual_time import VirtualTimeLoop
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.mixed_ends import KEYS, Asked, Clients, left_behind
from tests.scheduler.virtual_time import until

SMALL: dict[str, Any] = {"vocab_size": 300, "max_model_len": 512, "num_blocks": 30, "prefill_chunk_size": 64}
BODY = {"prompt": [[1, 2, 3], [4] * 80], "n": 2, "max_tokens": 4, "stream": True}
Happens = Callable[[FakeCluster, Asked], object]


class TurnLoop(VirtualTimeLoop):
    """An event loop that calls a function in one of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self._turns_to_go = 0
        self._happens: Callable[[], object] | None = None

    def after(self, num_turns: int, happens: Callable[[], object]) -> None:
        """Call `happens` after this many turns."""
        self._turns_to_go, self._happens = num_turns, happens

    @property
    def has_happened(self) -> bool:
        """Whether it was called."""
        return self._happens is None

    def _run_once(self) -> None:
        self._turns_to_go -= 1
        if self._turns_to_go == 0 and self._happens is not None:
            self.call_soon(self._happens)
            self._happens = None
        super()._run_once()  # type: ignore[misc]  # asyncio's own: one turn


def _disconnect(_: FakeCluster, request: Asked) -> None:
    request.exchange.leave("the client went away")


def _kill(cluster: FakeCluster, _: Asked) -> None:
    cluster.kill(2)


def _kill_and_leave(cluster: FakeCluster, request: Asked) -> None:
    cluster.kill(2)
    request.exchange.leave("the client went away")


def _remove(cluster: FakeCluster, _: Asked) -> None:
    cluster.control.registry.change([one for one in cluster.expected if one.index not in (0, 2)], "another table")


def _close(cluster: FakeCluster, _: Asked) -> "asyncio.Task[None]":
    return asyncio.create_task(cluster.control.dispatch.close(0.0))


@pytest.mark.parametrize(
    ("happens", "endings"),
    [
        (_disconnect, {"gone", "streamed"}),
        (_kill, {"streamed"}),
        pytest.param(_kill_and_leave, {"gone", "streamed"}, marks=pytest.mark.long),
        pytest.param(_remove, {"streamed"}, marks=pytest.mark.long),
        pytest.param(_close, {"503", "failed in the stream", "streamed"}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("fails", [pytest.param(True, marks=pytest.mark.long), False])
def test_nothing_is_left_of_a_request_in_whatever_turn_it_ends(
    happens: Happens, endings: set[str], fails: bool, tokens: Tokens
) -> None:
    found, has_happened, num_turns = Counter[str](), True, 0
    while has_happened:
        num_turns += 1
        with asyncio.Runner(loop_factory=TurnLoop) as runner:
            ending, has_happened = runner.run(_ask(num_turns, happens, tokens, fails=fails))
        found[ending] += 1

    assert set(found) == endings, found
    assert num_turns > 40


async def _ask(num_turns: int, happens: Happens, tokens: Tokens, *, fails: bool) -> tuple[str, bool]:
    """Run a request with the event after this many turns; return its outcome, and whether the event came before it."""
    loop, unseen = asyncio.get_running_loop(), list[dict[str, Any]]()
    assert isinstance(loop, TurnLoop)
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    cluster = FakeCluster("PPDD", limits=ControlLimits(num_tenants=len(KEYS), min_retries=1), **SMALL)
    async with cluster.serving():
        cluster.instances[0].behaviour.fail_handoffs = int(fails)
        clients = Clients(cluster, tokens, random.Random(0), 0.02 if num_turns % 2 else None)
        requests = clients.begin("/v1/completions", BODY, KEYS[0])
        kept = list[object]()  # a task without a reference may be garbage-collected
        loop.after(num_turns, lambda: kept.append(happens(cluster, requests)))
        await asyncio.wait({requests.answering}, timeout=60.0)
        has_happened = loop.has_happened
        loop.after(0, lambda: None)

        assert requests.answering.done()
        await until(lambda: not left_behind(cluster))
        counters, ledger = clients.context.metrics.counters, cluster.control.dispatch.ledger
        assert ledger.received == ledger.completed + ledger.failed + ledger.cancelled
        assert sum(counters.http.values()) == 1
        assert sum(counters.outcomes.values()) <= ledger.received + ledger.rejected
        assert clients.context.drain.active == 0
    assert unseen == []
    return requests.outcome, has_happened
