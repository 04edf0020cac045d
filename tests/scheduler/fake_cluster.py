"""A control plane over fake instances in memory, for the tests of this package."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Connect
from scheduler.model.kind import ModelKind
from scheduler.recorded_output import RecordedOutput
from scheduler.registry import Registry
from scheduler.request import Dispatcher, GenerationRequest, PromptDone
from simulation.instance import SimulatedInstance
from simulation.prompt import simulated_token
from testing.scheduler.first_of_ties import FirstOfTies
from testing.wire.fake_network import FakeNetwork
from tests.scheduler.virtual_time import until
from wire.description import InstanceDescription, ModelIdentity
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION, FinishReason, Role, SamplingParams, TokenOutput

TABLE_DIGEST = "7ab1e"
VOCAB = 1000


def describe(index: int, role: Role, **changes: Any) -> InstanceDescription:
    """Return the description of instance `index` of the table."""
    description = InstanceDescription(
        instance_id=f"{role}-{index}",
        epoch=index + 1,
        server_ip="10.0.0.1",
        device_ids=(str(index),),
        host="10.0.0.1",
        port=8000 + index,
        pid=100 + index,
        role=role,
        table_digest=TABLE_DIGEST,
        protocol_version=PROTOCOL_VERSION,
        model=ModelIdentity("tiny", "aaaa", "bbbb"),
        max_model_len=4096,
        vocab_size=VOCAB,
        dtype="float32",
        block_size=16,
        num_blocks=64,
        kv_tensors=(KvTensor(0, "k", 2, 8, "float32"), KvTensor(0, "v", 2, 8, "float32")),
        prefill_chunk_size=32,
        max_num_seqs=8,
        endpoints=(),
    )
    return dataclasses.replace(description, **changes)


def control_over(
    expected: Sequence[ExpectedInstance], connect: Connect, limits: ControlLimits, *, scheduler_id: str = "s",
    table_digest: str = TABLE_DIGEST, kind: ModelKind = ModelKind.TEXT,
) -> Control:  # fmt: skip
    """Return a control plane that dials with `connect`."""
    registry = Registry(
        expected,
        connect,
        table_digest=table_digest,
        scheduler_id=scheduler_id,
        epoch=1,
        limits=limits,
        rng=FirstOfTies(),
    )
    return Control(registry, limits, id_prefix=scheduler_id, kind=kind)


class FakeCluster:
    """Fake instances by address and the control plane that connects to them. `kind`: class of instances to start."""

    def __init__(
        self, roles: str, *, limits: ControlLimits | None = None, probes: bool = False,
        kind: ModelKind = ModelKind.TEXT, **changes: Any,
    ) -> None:  # fmt: skip
        """`roles`: one letter for each instance in table order, P, D or C; `changes` go into every description.

        Without `probes` a test sees only its own requests.
        """
        by_letter = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COMBINED}
        self.network = FakeNetwork()
        self.peers: dict[str, SimulatedInstance] = {}
        self.descriptions = [describe(i, by_letter[letter], **changes) for i, letter in enumerate(roles)]
        self.expected = [
            ExpectedInstance(
                i, f"{d.role}-{roles[:i].count(roles[i])}", d.role, f"{d.host}:{d.port}", d.server_ip, d.device_ids
            )
            for i, d in enumerate(self.descriptions)
        ]
        self.instances: list[SimulatedInstance] = []
        self.kind = SimulatedInstance
        self._probes = probes
        self.control = control_over(self.expected, self.network.connect, limits or ControlLimits(), kind=kind)

    def boot(self, index: int, **changes: Any) -> SimulatedInstance:
        """Start (or restart) one instance."""
        instance = self.kind(dataclasses.replace(self.descriptions[index], **changes), self.peers)
        self.network.listen(self.expected[index].address, instance)
        self.instances[index : index + 1] = [instance]
        return instance

    def kill(self, index: int) -> None:
        """Kill -9 one instance."""
        self.instances[index].die()
        self.network.kill(self.expected[index].address)

    @property
    def blocks_used(self) -> list[int]:
        """Blocks held on every instance."""
        return [instance.blocks_used for instance in self.instances]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Boot everything and run the control plane."""
        for index in range(len(self.expected)):
            self.boot(index)
        running = asyncio.create_task(self.control.run() if self._probes else self.control.registry.run())
        try:
            registry = self.control.registry
            await registry.wait_path(10.0)
            await until(lambda: not registry.missing())
            yield self
        finally:
            await self.control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running}, timeout=10.0)


def request(
    *prompts: tuple[int, ...], limits_s: tuple[float, float] = (30.0, 10.0), **params: Any
) -> GenerationRequest:
    """Return a request with these prompts; `params` are sampling parameters."""
    return GenerationRequest("r", prompts, SamplingParams(**{"max_tokens": 4, **params}), *limits_s)


class Answer(RecordedOutput):
    """The output of one request; checks that indices ascend and that each sequence finishes once."""

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Check a token and keep it."""
        before = self.outputs.get((prompt_index, token.sequence), [])
        assert not before or before[-1].finish is None
        assert token.index == len(before)
        return super().emit(prompt_index, token)

    def prompt_done(self, done: PromptDone) -> None:
        """Check a report and keep it."""
        assert done.prompt_index not in self.done
        super().prompt_done(done)

    @property
    def finishes(self) -> dict[tuple[int, int], FinishReason]:
        """The finish reasons by (prompt, sequence)."""
        return {key: outputs[-1].finish for key, outputs in self.outputs.items() if outputs[-1].finish is not None}


class Running(Answer):
    """A request running in its own task, whose tokens can be read one by one.

    `is_last`: whether to stop the sequence at this token.
    """

    def __init__(
        self, dispatcher: Dispatcher, requested: GenerationRequest,
        is_last: Callable[[TokenOutput], bool] = lambda token: False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._unread: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        self._is_last = is_last
        self.task = asyncio.create_task(dispatcher.run(requested, self))
        self.task.add_done_callback(lambda _: self._unread.put_nowait(None))

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Keep a token; return whether more of its sequence is wanted."""
        self._unread.put_nowait(token)
        return super().emit(prompt_index, token) and not self._is_last(token)

    async def read(self) -> AsyncIterator[TokenOutput]:
        """Yield the tokens as they arrive. Raises the error that failed the request."""
        while (token := await self._unread.get()) is not None:
            yield token
        await self.task


async def collect(dispatcher: Dispatcher, requested: GenerationRequest) -> Answer:
    """Run a request to its end."""
    answer = Answer()
    await dispatcher.run(requested, answer)
    return answer


def expected(token_ids: tuple[int, ...], count: int, sequence: int = 0) -> list[int]:
    """Return the first tokens that a fake instance generates."""
    return [simulated_token(token_ids, sequence, index, VOCAB) for index in range(count)]
