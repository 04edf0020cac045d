"""A simulated instance's prompts, their fixed outputs, and its behaviour. Plain data and arithmetic."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from wire.event_sink import EventSink
from wire.kept_stream import KeptStream
from wire.step_cost import StepCost
from wire.types import FinishReason, PromptState, SamplingParams, Ticket, TokenOutput


@dataclass(slots=True)
class Behaviour:
    """How the instance behaves; may be changed at run time. Times in seconds.

    A step takes `step_s`, or what it costs if `cost` is given: then chunks keep the gaps of the instance's streams
    below `gap_limit_s`, or below a prompt's own limit. A hand-off takes `send_s`, and `send_token_s` for each token of
    the prompt. With `caches_prefixes` a prefix that was computed or received is not computed again.

    The next reservations are refused with the errors named in `refuse`; the next `fail_handoffs` hand-offs fail. All
    events are delayed by `lag_s`. With `ignores_commands` no command has an effect; a stuck instance (see `get_stuck`)
    runs no step. At most the `max_running` oldest prompts decode in a step (None: no limit). The instance reports
    `slowest_turn_s`, and a `starved_s` that starts at `starved_before_s` and grows by `starved_share` of the time.
    """

    step_s: float = 0.01
    cost: StepCost | None = None
    gap_limit_s: float = 0.1
    send_s: float = 0.005
    send_token_s: float = 0.0
    caches_prefixes: bool = False
    lag_s: float = 0.0
    slowest_turn_s: float = 0.0
    starved_share: float = 0.0
    starved_before_s: float = 0.0
    repeat_tokens: bool = False
    stuck: bool = False
    ignores_commands: bool = False
    fail_handoffs: int = 0
    max_running: int | None = None
    refuse: deque[str] = field(default_factory=deque)


@dataclass(slots=True)
class SimulatedPrompt:
    """One prompt of a session. `stage`: reserved (D), waiting (for prefill), sending (P), decoding, ended (kept)."""

    owner: EventSink
    prompt_id: str
    num_tokens: int
    stage: str
    blocks: int
    probe: bool
    state: PromptState | None = None
    ticket: Ticket | None = None
    computed: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    first_step_sent: bool = False
    kept: KeptStream | None = None
    runs_too_long: bool = False

    def set_outputs(self, state: PromptState) -> None:
        """Begin with the outputs so far."""
        self.outputs = [list(output) for output in state.outputs] or [[] for _ in range(state.params.num_sequences)]
        self.ended = {i for i, output in enumerate(self.outputs) if simulated_finish(state.params, output)}

    def sample(self, vocab_size: int) -> Iterator[TokenOutput]:
        """Add one token to each open sequence; if the prompt is handed off, only its first tokens."""
        state, only_first = self.state, self.ticket is not None and self.stage == "waiting"
        assert state is not None
        for i, output in enumerate(self.outputs):
            if i in self.ended or (only_first and output):
                continue
            output.append(simulated_token(state.token_ids, i, len(output), vocab_size))
            finish = simulated_finish(state.params, output)
            stop_id = output[-1] if finish is FinishReason.STOP else None
            yield self._taken(TokenOutput(self.prompt_id, i, len(output) - 1, output[-1], finish, stop_id))

    def cancel(self, sequence: int | None) -> Iterator[TokenOutput]:
        """End a sequence, or all."""
        for i in range(len(self.outputs)) if sequence is None else (sequence,):
            if i not in self.ended:
                yield self._taken(TokenOutput(self.prompt_id, i, len(self.outputs[i]), None, FinishReason.CANCELLED))

    def _taken(self, token: TokenOutput) -> TokenOutput:
        if token.finish is not None:
            self.ended.add(token.sequence)
        if self.kept is not None and not self.kept.add(token, owned=not self.owner.ended):
            self.runs_too_long = True
        return token


def simulated_token(token_ids: tuple[int, ...], sequence: int, index: int, vocab_size: int) -> int:
    """Return the token every simulated instance samples: output `index` of `sequence` after these prompt ids."""
    return (31 * sum(token_ids) + 7 * sequence + 13 * index) % vocab_size


def simulated_vector(token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return the vector every simulated instance computes; exact in float32."""
    return (float(sum(token_ids)), float(len(token_ids)))


def simulated_finish(params: SamplingParams, output: list[int]) -> FinishReason | None:
    """Return the sequence's finish reason, None while it runs."""
    if output and output[-1] in params.stop_token_ids and len(output) >= params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= params.max_tokens else None
