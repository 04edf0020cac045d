"""Run prompts on real instance processes, through the scheduler's dispatch in this process.

All runs share one event loop (`runner`): gRPC has one poller per process, which would report
leftover events of a closed loop to the next one as errors.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve import combined
from pdserve.layout import ClusterShape, ProcessPlan, environment, lay_out
from pdserve.ports import free_ports
from pdserve.processes import Child, stop
from pdserve.trust import trust_of
from pdserve.verify_devices import DeviceKindPair
from ranktable_tools.launch_plan import resolve
from rpc.grpc_connection import GrpcConnection
from scheduler.config import SchedulerOptions
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.process import cluster_of
from scheduler.recorded_output import record
from scheduler.request import GenerationRequest, PromptDone
from scheduler.serving import Cluster, build_control
from wire.errors import DeadlineExceeded, HandoffFailed, Unavailable
from wire.types import Role, SamplingParams

START_TIMEOUT_S = 300.0
FIRST_TOKEN_TIMEOUT_S = 300.0
STALL_TIMEOUT_S = 60.0
_POLL_S = 0.05
MORE_TOKENS = 8
"""The next turn of a chat is the last prompt, its output, and this many of the prompt's first tokens."""
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """The prompts with their outputs, the bytes of KV sent for them, and how many of their tokens had cached KV."""

    prompts: list[tuple[int, ...]]
    outputs: list[list[int]]
    kv_bytes: int
    cached_tokens: list[int]

    def num_cached_outputs(self, lengths: Iterable[int]) -> int:
        """Return how many tokens of earlier outputs were cached, after prompts of these lengths."""
        return sum(max(0, cached - length) for cached, length in zip(self.cached_tokens, lengths, strict=True))


@dataclass(frozen=True, slots=True)
class Deployment:
    """The instance processes to start, and the scheduler's view of them as a cluster."""

    instances: tuple[ProcessPlan, ...]
    cluster: Cluster


def pair(folder: Path, flags: Sequence[str], transport: str, devices: DeviceKindPair) -> Deployment:
    """Return one prefill and one decode instance with `flags` on these devices; tables in `folder`.

    Their KV hop goes over `transport`.
    """
    (port,) = free_ports(1)  # for the scheduler, which is this process and does not listen
    table_device = devices.prefill if devices.is_alike else DeviceKindPair().prefill
    shape = ClusterShape(1, 1, "127.0.0.1", port, (*flags, "--kv-transport", transport), table_device)
    prefill, decode, scheduler = lay_out(shape, folder / "tables")
    environ = environment(scheduler, {})
    plan = resolve(environ)
    instances = _with_device(prefill, devices.prefill), _with_device(decode, devices.decode)
    return Deployment(instances, cluster_of(plan, trust_of(plan, environ), SchedulerOptions()))


def _with_device(plan: ProcessPlan, device: str) -> ProcessPlan:
    return replace(plan, command=(*plan.command, "--device", device))


def alone(flags: Sequence[str], environ: Mapping[str, str] | None = None) -> Deployment:
    """Return one combined instance with `flags`, and `environ` added to our environment."""
    (port,) = free_ports(1)
    address = f"{combined.HOST}:{port}"
    where = ("--host", combined.HOST, "--port", str(port))
    command = (sys.executable, "-P", "-m", "pdserve.combined", *where, *flags)
    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, address, combined.HOST, combined.DEVICE_IDS)
    return Deployment(
        (ProcessPlan("combined", "combined", address, command, environ or {}),), Cluster((expected,), GrpcConnection)
    )


def through_pd(
    runner: asyncio.Runner, folder: Path, flags: Sequence[str], transport: str, devices: DeviceKindPair,
    prompts: Prompts, n: int,
) -> VerifyOutputs:  # fmt: skip
    """Serve prompts with one prefill and one decode instance on `devices` over `transport`, `n` greedy tokens each.

    Raises HandoffFailed when a prompt took another path, and Unavailable when an instance dies.
    """
    served, done = runner.run(_serve(folder, pair(folder, flags, transport, devices), prompts, n))[0]
    for prompt in done:
        if prompt.path != "handoff" or prompt.times.transport != transport:
            raise HandoffFailed(f"a prompt was sent by {prompt.path} over {prompt.times.transport!r}, not {transport}")
    return served


def through_combined(
    runner: asyncio.Runner, folder: Path, flags: Sequence[str], prompts: Prompts, n: int
) -> tuple[VerifyOutputs, VerifyOutputs]:
    """Serve prompts with one combined instance, `n` greedy tokens each, and a next turn after each answer.

    Raises Unavailable when the instance dies.
    """
    (first, _), (after, _) = runner.run(_serve(folder, alone(flags), prompts, n, num_turns=2))
    return first, after


@contextlib.asynccontextmanager
async def serving(folder: Path, deployment: Deployment) -> AsyncIterator[Control]:
    """Start the instances, wait until they are ready, and stop them on exit. Raises Unavailable when one dies."""
    children: list[Child] = []
    try:
        for plan in deployment.instances:
            # Appended one by one, so that stop() gets those started before one failed.
            children.append(Child(plan, folder / f"{plan.name}.log", os.environ))
        control = build_control(deployment.cluster, ControlLimits())
        async with _running(control):
            await _until_ready(control, children)
            yield control
    finally:
        await asyncio.to_thread(_stop, children)


def _stop(children: Sequence[Child]) -> None:
    stop([child.record for child in children])
    for child in children:
        child.reap()


async def _serve(
    folder: Path, deployment: Deployment, prompts: Prompts, n: int, *, num_turns: int = 1
) -> list[tuple[VerifyOutputs, list[PromptDone]]]:
    turns: list[tuple[VerifyOutputs, list[PromptDone]]] = []
    async with serving(folder, deployment) as control:
        for _ in range(num_turns):
            asked = [tuple(prompt) for prompt in prompts]
            pairs = await asyncio.gather(*(_run_prompt(control, number, one, n) for number, one in enumerate(asked)))
            outputs, done = [tokens for tokens, _ in pairs], [one for _, one in pairs]
            kv_bytes, cached = sum(one.times.kv_bytes for one in done), [one.times.cached_tokens for one in done]
            turns.append((VerifyOutputs(asked, outputs, kv_bytes, cached), done))
            prompts = [(*one, *tokens, *one[:MORE_TOKENS]) for one, tokens in zip(asked, outputs, strict=True)]
    return turns


async def _run_prompt(control: Control, number: int, prompt: Sequence[int], n: int) -> tuple[list[int], PromptDone]:
    request = GenerationRequest(
        request_id=f"verify-{number}",
        prompts=(tuple(prompt),),
        params=SamplingParams(max_tokens=n, temperature=0.0),
        first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S,
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    output = await record(control.dispatch, request)
    return output.tokens[0, 0], output.done[0]


@contextlib.asynccontextmanager
async def _running(control: Control) -> AsyncIterator[None]:
    task = asyncio.create_task(control.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await control.dispatch.close(0)


async def _until_ready(control: Control, children: Sequence[Child]) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not control.ready():
        for child in children:
            end = child.ended()
            if end is not None:
                raise Unavailable(end)
        if asyncio.get_running_loop().time() > deadline:
            missing = "; ".join(str(one) for one in control.registry.missing())
            raise DeadlineExceeded(f"not ready after {START_TIMEOUT_S:g} s; missing: {missing}")
        await asyncio.sleep(_POLL_S)
