"""Send a trace to a simulated cluster, and record when each token arrives."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.request import GenerationRequest, PromptDone
from simulation.cluster import Shape, SimulatedCluster
from simulation.trace import TraceRequest, prompt_of
from simulation.virtual_time import VirtualTimeLoop
from wire.errors import NeverFits, Overloaded
from wire.types import SamplingParams, TokenLogprobs, TokenOutput

_NEVER_S = 1e9
_MAX_RETRIES = 2
"""The default of the official clients; each retry waits for the Retry-After of a 429."""


@dataclass(slots=True)
class Served:
    """The result of one request: loop times in seconds, and the path of its prompt. Implements TokenSink.

    A request without any token was refused at each try, or is too long for every instance.
    """

    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    path: str = ""
    reason: str = ""
    num_tries: int = 0

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        """The mean time between two tokens; 0 if there is only one token."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Record a token's time."""
        now = asyncio.get_running_loop().time()
        if self.num_tokens:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last)
        else:
            self.first = now
        self.last = now
        self.num_tokens += 1
        return True

    def prompt_ids(self, prompt_index: int, token_ids: tuple[int, ...]) -> None:
        """Do nothing: prompts are ids already."""

    def prompt_logprobs(self, prompt_index: int, tokens: Sequence[TokenLogprobs | None]) -> None:
        """Do nothing: none are requested."""

    def vector(self, prompt_index: int, values: tuple[float, ...]) -> None:
        """Do nothing: none is requested."""

    def prompt_done(self, done: PromptDone) -> None:
        """Record how the prompt was served."""
        start, end = done.prefill_instance, done.decode_instance
        self.path = done.path if start else f"{done.path} on {(end or '').rpartition('-')[0]}"
        self.reason = done.reason


def simulate(
    shape: Shape, trace: Sequence[TraceRequest], *, seed: int = 0,
    made: Callable[[SimulatedCluster], object] = lambda _: None,
) -> list[Served]:  # fmt: skip
    """Return the result of each request of the trace, in order; `made` is called with the cluster before the start.

    Several schedulers get the requests in turn. Raises the error of a request that failed.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        cluster = SimulatedCluster(shape, seed=seed)
        made(cluster)
        return runner.run(_replay(cluster, trace))


async def _replay(cluster: SimulatedCluster, trace: Sequence[TraceRequest]) -> list[Served]:
    loop = asyncio.get_running_loop()
    async with cluster.serving(), asyncio.TaskGroup() as tasks:
        begun = loop.time()

        async def one(number: int, request: TraceRequest, served: Served) -> None:
            await asyncio.sleep(request.arrival_s)
            params = SamplingParams(max_tokens=request.num_output_tokens, seed=number)
            prompts = (prompt_of(number, request),)
            control = cluster.controls[number % len(cluster.controls)]
            while True:
                served.num_tries += 1
                try:
                    await control.dispatch.run(
                        GenerationRequest(
                            str(number), prompts, params, _NEVER_S, _NEVER_S, request_class=request.request_class
                        ),
                        served,
                    )
                except Overloaded as refusal:
                    if served.num_tries > _MAX_RETRIES or refusal.is_final:
                        return
                    await asyncio.sleep(refusal.retry_after_s)
                except NeverFits:  # no pool has room for it
                    return
                else:
                    return

        results = [Served(begun + request.arrival_s) for request in trace]
        for number, (request, served) in enumerate(zip(trace, results, strict=True)):
            tasks.create_task(one(number, request, served))
    return results
