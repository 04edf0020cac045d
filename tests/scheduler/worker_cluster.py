"""A control plane over fake vLLM workers on real sockets, for the tests of workers."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.kv_pairs import KvGap
from scheduler.membership.worker_ranks import split_address
from scheduler.request import GenerationRequest
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.engine_ids import EngineIds
from testing.engine.fake_model import FakeConfig
from testing.vllm_worker.faults import Action, Point
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker, Received
from tests.scheduler.fake_cluster import Answer, collect, control_over
from tests.scheduler.virtual_time import until
from wire.types import Role

ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COMBINED}
SETTINGS = WorkerSettings(FakeConfig(num_layers=1, vocab_size=1000))
LEG_FAULTS: list[tuple[str, Point, Action]] = [
    ("prefill", "before", "die"),
    ("prefill", "before", "drop"),
    ("prefill", "before", "error"),
    ("prefill", "before", "html"),
    ("prefill", "after", "die"),
    ("decode", "before", "die"),
    ("decode", "before", "error"),
    ("decode", "before", "empty"),
    ("decode", "during", "die"),
    ("decode", "during", "cut"),
    ("decode", "during", "error"),
]


class WorkerCluster:
    """Fake workers, one for each letter of `roles`, and the control plane in front of them."""

    def __init__(self, roles: str, *settings: WorkerSettings, limits: ControlLimits | None = None) -> None:
        """`settings` of each worker; the last one's for those that follow."""
        given = settings or (SETTINGS,)
        self.workers = [FakeVllmWorker(given[min(index, len(given) - 1)]) for index in range(len(roles))]
        self._roles = roles
        self._limits = limits or ControlLimits()
        self.connector: str = self.workers[0].settings.connector
        self.callbacks = Callbacks()
        self._engine_ids = EngineIds(self._is_listed)
        self.control: Control

    async def answer(self, requested: GenerationRequest) -> Answer:
        """Run a request to its end."""
        return await collect(self.control.dispatch, requested)

    def gaps(self) -> list[KvGap]:
        """Return the pairs that do not serve, once the control plane runs."""
        return self.control.registry.gaps() if hasattr(self, "control") else []

    def without(self, number: int) -> list[ExpectedInstance]:
        """Return the members other than the worker with this number."""
        return [one for one in self._expected if one.index != number]

    def _is_listed(self, address: str) -> bool:
        registry = self.control.registry
        return any(one.expected.address == address for one in (*registry.members, *registry.leaving))

    def kv_usage(self, role: Role) -> float:
        """Return the sum of the shares of KV caches in use, over the workers of a role."""
        workers = [worker for letter, worker in zip(self._roles, self.workers, strict=True) if ROLES[letter] is role]
        return sum(rank.kv_usage for worker in workers for rank in worker.ranks)

    def _connect(self, address: str) -> WorkerConnection:
        ports = {worker.url: worker.settings.bootstrap_port for worker in self.workers}
        return WorkerConnection(
            address, connector=self.connector, callbacks=self.callbacks,
            bootstrap_port=ports[split_address(address)[0]], engine_ids=self._engine_ids,
        )  # fmt: skip

    @asynccontextmanager
    async def serving(self, path_s: float = 30.0) -> AsyncIterator["WorkerCluster"]:
        """Start the workers and the control plane; on exit nothing may be left on a worker that lives."""
        for worker in self.workers:
            await worker.start()
        self._expected = [
            ExpectedInstance(at, f"{ROLES[one]}-{self._roles[:at].count(one)}", ROLES[one], worker.url, "", ())
            for at, (one, worker) in enumerate(zip(self._roles, self.workers, strict=True))
        ]
        self.control = control = control_over(self._expected, self._connect, self._limits)
        running = asyncio.create_task(control.run())
        try:
            await control.registry.wait_path(path_s)
            await until(lambda: not (control.registry.missing() or control.registry.gaps()))
            for worker in self.workers:
                worker.received.clear()
            yield self
        finally:
            await control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running}, timeout=30.0)
            await self.callbacks.close()
            for worker in self.workers:
                await worker.stop()


def leg_id(one: Received) -> str:
    """Return the id of a request."""
    return next(value for name, value in one.headers.items() if name.lower() == "x-request-id")


def with_fake(**changes: Any) -> WorkerSettings:
    """Return settings with another fake model."""
    return dataclasses.replace(SETTINGS, fake=dataclasses.replace(SETTINGS.fake, **changes))
