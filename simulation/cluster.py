"""The real control plane (dispatch, admission and placement) over simulated instances, on the event loop's clock."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.registry import Registry
from simulation.instance import SimulatedInstance
from simulation.prompt import Behaviour
from wire.description import InstanceDescription, ModelIdentity
from wire.inprocess import InProcessConnection
from wire.kv_layout import KvTensor
from wire.step_cost import StepCost
from wire.types import PROTOCOL_VERSION, Role

_READY_S = 60.0
_VOCABULARY = 1 << 20
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster to simulate: the roles of its instances, what their steps cost, and their flags.

    A hand-off takes `send_s`, plus `send_token_s` for each token of its prompt. `compare_paths` stands for the
    scheduler's `--path auto`, `follow_load` for `--roles auto`, and `ttft_limit_s` for `--ttft-limit`, 0 for none.
    Everything that instances report arrives `load_lag_s` later. Each of several schedulers has its own session with
    every instance; only the first scheduler changes roles.
    """

    roles: Sequence[Role]
    cost: StepCost
    compare_paths: bool = False
    follow_load: bool = False
    gap_limit_s: float = 0.1
    prefill_chunk_size: int = 512
    max_num_seqs: int = 64
    num_blocks: int = 4096
    block_size: int = 32
    send_s: float = 0.005
    send_token_s: float = 0.0
    load_lag_s: float = 0.0
    ttft_limit_s: float = 0.0
    caches_prefixes: bool = True
    num_schedulers: int = 1

    def comparing_paths(self) -> "Shape":
        """Return the same cluster with `--path auto`."""
        return replace(self, compare_paths=True)


class SimulatedCluster:
    """Owner of the instances and of the control plane of each scheduler over them."""

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        """`seed` makes the registry's random waits repeatable."""
        self._shape = shape
        self._peers: dict[str, SimulatedInstance] = {}
        descriptions = [_describe(i, role, shape) for i, role in enumerate(shape.roles)]
        self._expected = [
            ExpectedInstance(one.port, one.instance_id, one.role, str(one.port), one.server_ip, one.device_ids)
            for one in descriptions
        ]
        behaviour = Behaviour(
            cost=shape.cost, gap_limit_s=shape.gap_limit_s, send_s=shape.send_s, send_token_s=shape.send_token_s,
            caches_prefixes=shape.caches_prefixes,
        )  # fmt: skip
        self.instances = []
        for description in descriptions:
            instance = SimulatedInstance(description, self._peers)
            instance.behaviour = replace(behaviour, lag_s=shape.load_lag_s)
            self.instances.append(instance)
        never = 1_000_000_000  # no queue limit: requests of a simulated overload wait
        limits = ControlLimits(
            max_queued_requests=never,
            max_queued_tokens=never,
            compare_paths=shape.compare_paths,
            follow_load=shape.follow_load,
            ttft_limit_s=shape.ttft_limit_s,
            starved=_never_starved,
        )
        self.controls = [self._control(f"simulated-{i}", limits, seed + i) for i in range(shape.num_schedulers)]

    @property
    def control(self) -> Control:
        """The control plane of the first scheduler."""
        return self.controls[0]

    def _control(self, scheduler_id: str, limits: ControlLimits, seed: int) -> Control:
        registry = Registry(
            self._expected, self._connect, table_digest="", scheduler_id=scheduler_id, epoch=1, limits=limits,
            rng=random.Random(seed),  # noqa: S311 - no secret
        )  # fmt: skip
        return Control(registry, limits, id_prefix=scheduler_id)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Connect to all instances and run the control planes."""
        registries = [control.registry for control in self.controls]
        running = [asyncio.create_task(registry.run()) for registry in registries]
        if self._shape.follow_load:
            running.append(asyncio.create_task(self.control.roles.run()))
        try:
            async with asyncio.timeout(_READY_S):
                while any(registry.missing() for registry in registries):  # noqa: ASYNC110 - the time is virtual
                    await asyncio.sleep(0.01)
            yield
        finally:
            for control in self.controls:
                await control.dispatch.close(0.0)
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_CLOSE_S)

    def _connect(self, address: str) -> InProcessConnection:
        return InProcessConnection(self.instances[int(address)])


def _never_starved() -> float:
    return 0.0


def _describe(index: int, role: Role, shape: Shape) -> InstanceDescription:
    return InstanceDescription(
        instance_id=f"{role}-{index}",
        epoch=index + 1,
        server_ip="simulated",
        device_ids=(str(index),),
        host="simulated",
        port=index,
        pid=index,
        role=role,
        table_digest="",
        protocol_version=PROTOCOL_VERSION,
        model=ModelIdentity("simulated", "", ""),
        max_model_len=_VOCABULARY,
        vocab_size=_VOCABULARY,
        dtype="float32",
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        kv_tensors=(KvTensor(0, "k", 1, 1, "float32"), KvTensor(0, "v", 1, 1, "float32")),
        prefill_chunk_size=shape.prefill_chunk_size,
        max_num_seqs=shape.max_num_seqs,
        endpoints=(),
    )
