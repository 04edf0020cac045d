"""What a fake instance knows of one prompt, what it answers, and how a test changes it. Plain data and arithmetic."""

from collections import deque
from dataclasses import dataclass, field

from wire.types import FinishReason, PromptState, SamplingParams, Ticket


@dataclass(slots=True)
class FakeBehaviour:
    """What the instance does; tests change it while it runs. Times in seconds.

    The next reservations are refused with the errors named in `refuse`; the next `fail_handoffs` hand-offs fail. All
    its events leave `lag_s` late. A `deaf` instance ignores commands; a stuck one (see `get_stuck`) makes no step. It
    runs as many prompts at once as it has `seats`, the oldest; None is no limit. It reports `slowest_turn_s`, and that
    the machine starves it for `starved_share` of the time, beside `starved_before_s`.
    """

    step_s: float = 0.01
    send_s: float = 0.005
    lag_s: float = 0.0
    slowest_turn_s: float = 0.0
    starved_share: float = 0.0
    starved_before_s: float = 0.0
    repeat_tokens: bool = False
    stuck: bool = False
    deaf: bool = False
    fail_handoffs: int = 0
    seats: int | None = None
    refuse: deque[str] = field(default_factory=deque)


@dataclass(slots=True)
class FakePrompt:
    """One prompt here. `stage`: reserved (D), waiting (for prefill), sending (P), decoding."""

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
    first_step_told: bool = False


def fake_token(token_ids: tuple[int, ...], sequence: int, index: int, vocab_size: int) -> int:
    """Return what every fake instance answers: output `index` of `sequence` after these prompt ids."""
    return (31 * sum(token_ids) + 7 * sequence + 13 * index) % vocab_size


def fake_vector(token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return what every fake instance answers where a vector is wanted; exact in float32."""
    return (float(sum(token_ids)), float(len(token_ids)))


def fake_finish(params: SamplingParams, output: list[int]) -> FinishReason | None:
    """Return how the sequence has ended, if it has."""
    if output and output[-1] in params.stop_token_ids and len(output) >= params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= params.max_tokens else None
