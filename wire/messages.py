"""Commands a scheduler sends to an instance and events that come back, all over one session.

    scheduler                                  instance
       | -- OpenSession ------------------------> |   first, once
       | <------------------------- SessionOpen -- |
       | -- Reserve ----------------------------> D | <- Reserved | Refused
       | -- Prefill(ticket) --------------------> P | <- Step(tokens: the first of each sequence)
       |                     P ==KV frames, commit==> D
       | <----------- HandedOff (P: acked by D) -- P
       | <----------- Step(tokens of all prompts) - D   one message a step
       | -- Cancel ------------------------------> P, D
       | -- MeasureLink -------------------------> P | <- LinkMeasured
       | -- Heartbeat (1/s) ---------------------> |  <- Heartbeat(load)
       | <---------------------------- TableRead -- |   at the start, and when its global table changes

Every prompt that an instance accepted ends there exactly once: on P with HandedOff or Failed (HandedOff too when the
first tokens end everything and no KV crosses), on D and on a combined instance with the `finish` of each of its
sequences or with Failed. Cancel is answered by the same endings; it is idempotent and silent for a prompt not known.
"""

from dataclasses import dataclass

from wire.types import (
    KvEndpoint,
    LinkStatus,
    LoadSnapshot,
    PromptLogprobs,
    PromptState,
    StageTimes,
    Ticket,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """First message of a session.

    An older session of the same scheduler ends with all its work; while another scheduler's lives, this one is refused.
    """

    scheduler_id: str
    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate blocks for a prompt whose KV will come; answered by Reserved or Refused."""

    prompt: PromptState


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt, sample the first token of each sequence, hand the KV to `ticket`'s instance."""

    prompt: PromptState
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Generate:
    """Compute the prompt and generate to its end on this instance. Outputs so far may be given: it resumes."""

    prompt: PromptState


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a prompt, or one of its sequences. `ticketed` blocks and held KV are released."""

    prompt_id: str
    sequence: int | None = None
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class MeasureLink:
    """Measure round trip and bandwidth of the link to a peer with `num_bytes` that reach no pool; dialled if need be.

    Answered by one LinkMeasured of the same `peer_id`.
    """

    peer_id: str
    epoch: int
    endpoints: tuple[KvEndpoint, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Keeps the session's lease; from the instance it carries the load."""

    load: LoadSnapshot | None = None


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """The instance accepted the session."""

    instance_id: str
    epoch: int
    load: LoadSnapshot


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to Reserve."""

    prompt_id: str
    ticket: Ticket
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The instance did not take the prompt: nothing of it is left there. `error` is a name of wire.errors."""

    prompt_id: str
    error: str
    message: str
    load: LoadSnapshot | None = None


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class Step:
    """All new tokens of one step, over all prompts, and the load after it; what no message holds comes in several."""

    tokens: tuple[TokenOutput, ...]
    load: LoadSnapshot
    times: tuple[tuple[str, StageTimes], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class HandedOff:
    """P: the receiver acked; P released its blocks."""

    prompt_id: str
    times: StageTimes


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a prompt with pooling: its vector, or its score as the only value. It has ended there."""

    prompt_id: str
    values: tuple[float, ...]
    times: StageTimes


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt ended in an error on this instance; nothing of it is left there."""

    prompt_id: str
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """How the link to a peer is now; `error` says why it could not be measured, empty when it was."""

    peer_id: str
    link: LinkStatus | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TableRead:
    """The instance goes by the global table of this digest from now on."""

    digest: str


Command = OpenSession | Reserve | Prefill | Generate | Cancel | MeasureLink | Heartbeat
Event = SessionOpen | Reserved | Refused | Step | HandedOff | Pooled | Failed | LinkMeasured | TableRead | Heartbeat
