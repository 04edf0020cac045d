"""Commands from a scheduler to an instance and the events it returns, all over one session, which owns its prompts.

    scheduler                                  instance
       | -- OpenSession ------------------------> |   first, once
       | <------------------------- SessionOpen -- |
       | -- Reserve ----------------------------> D | <- Reserved | Refused
       | -- Prefill(ticket) --------------------> P | <- Step(tokens: the first of each sequence)
       |                     P ==KV frames, commit==> D
       | <----------- HandedOff (P: acked by D) -- P
       | <----------- Step(tokens of all prompts) - D   one message per step
       | -- PrefillAndHold ---------------------> P | <- PrefillHeld(references), from workers of other engines
       |                                             | or PrefillBegun(references), later HandedOff
       | -- FetchAndGenerate(references) --------> D | <- Step
       | -- Cancel ------------------------------> P, D
       | -- Adopt ------------------------------> D | <- Adopted, then Step (its tokens so far) | Refused
       | -- ClaimRun, EndClaim ---------------------> D | <- Claimed (wire/claim_table.py)
       | -- MeasureLink -------------------------> P | <- LinkMeasured
       | -- Heartbeat (1/s) ---------------------> |  <- Heartbeat(load)
       | -- SetRole -----------------------------> |  <- RoleHeld, also after SessionOpen and others' SetRole
       | <---------------------------- TableRead -- |   at the start, and when its global table changes

Every accepted prompt finishes exactly once: on P with HandedOff or Failed (HandedOff too when the first tokens finish
every sequence and no KV is sent), on D and on a combined instance with the `finish` of each of its sequences or with
Failed. The same events answer Cancel, which is idempotent and gets no answer for an unknown prompt.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wire.cheap_dataclass import cheap_dataclass
from wire.errors import PdserveError, to_name
from wire.load import LinkStatus, LoadSnapshot
from wire.types import KvEndpoint, PromptLogprobs, PromptState, Role, StageTimes, Ticket, TokenOutput


@cheap_dataclass(frozen=True, slots=True)
class OpenSession:
    """First message of a session.

    An instance has one session with each scheduler: an older session of the same scheduler ends, with all its work.
    When a session is lost, its streams run on for `orphan_s` and may be adopted until then (wire/kept_stream.py).
    """

    scheduler_id: str
    epoch: int
    lease_s: float
    orphan_s: float = 0.0


@cheap_dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate blocks for a prompt whose KV another instance will send; answered by Reserved or Refused."""

    prompt: PromptState


@cheap_dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt, sample the first token of each sequence, send the KV to the instance of `ticket`."""

    prompt: PromptState
    ticket: Ticket


@cheap_dataclass(frozen=True, slots=True)
class Generate:
    """Compute the prompt and generate to the end on this instance; with outputs so far it resumes."""

    prompt: PromptState


@cheap_dataclass(frozen=True, slots=True)
class PrefillAndHold:
    """To a worker of another engine: compute the prompt and hold its KV for one fetch; answered by PrefillHeld.

    A worker that sends the KV by itself answers with PrefillBegun before it computes.
    """

    prompt: PromptState


@cheap_dataclass(frozen=True, slots=True)
class FetchAndGenerate:
    """To a worker of another engine: fetch the KV that each reference names, one per sequence, and generate to the end.

    A reference comes from `PrefillHeld` or `PrefillBegun`: it is opaque and used once.
    """

    prompt: PromptState
    references: tuple[Any, ...]


@cheap_dataclass(frozen=True, slots=True)
class Cancel:
    """End a prompt, or one of its sequences. Reserved blocks and held KV are released.

    Cancelling a stream needs its current `owner_epoch`. The end of its whole prompt also releases its kept tokens.
    """

    prompt_id: str
    sequence: int | None = None
    reason: str = "cancelled"
    owner_epoch: int = 0


@cheap_dataclass(frozen=True, slots=True)
class Adopt:
    """From now on, own a stream that the instance decodes, even if another session owns it.

    Answered by Adopted and a Step with the tokens that the instance has generated, or by Refused with UnknownStream,
    also for another `tenant`. With `owner_epoch` only a stream of that epoch is adopted, else StreamMoved is the error.
    The previous owner gets Failed with StreamMoved.
    """

    stream_id: str
    tenant: str
    owner_epoch: int | None = None


class ClaimState(StrEnum):
    """Of a request with an Idempotency-Key: the answer to ClaimRun. The claimer runs it if it is NEW or ORPHANED."""

    NEW = "new"
    ORPHANED = "orphaned"
    """Its scheduler is gone: the claimer adopts its stream, or runs it again."""
    RUNNING = "running"
    LEFT = "left"
    """It runs, but its client has left."""
    DONE = "done"
    DIFFERENT = "different"
    """Another request has this key."""
    FULL = "full"
    """Too many requests of this API key have a record."""


class RunEnd(StrEnum):
    """How the run of a claimed request ends; with MOVED and LEFT it goes on, elsewhere or without a client."""

    DONE = "done"
    FAILED = "failed"
    MOVED = "moved"
    LEFT = "left"


@cheap_dataclass(frozen=True, slots=True)
class ClaimRun:
    """Run a request with an Idempotency-Key as the stream of this id, unless it runs or has finished.

    Answered by Claimed. `record_id` stands for its API key and its idempotency key, `digest` for its content.
    """

    claim_id: str
    record_id: str
    tenant: str
    digest: str
    stream_id: str


@cheap_dataclass(frozen=True, slots=True)
class EndClaim:
    """The claimed run has ended; `answer` is the body of the answer if it is done."""

    claim_id: str
    record_id: str
    tenant: str
    digest: str
    end: RunEnd
    answer: bytes = b""


@cheap_dataclass(frozen=True, slots=True)
class MeasureLink:
    """Measure round trip and bandwidth to a peer with `num_bytes` that no pool receives; dials the link if needed.

    Answered by one LinkMeasured with the same `peer_id`.
    """

    peer_id: str
    epoch: int
    endpoints: tuple[KvEndpoint, ...]
    num_bytes: int


@cheap_dataclass(frozen=True, slots=True)
class SetRole:
    """Use the instance as `role` for new work; what runs there stays. Answered by RoleHeld.

    Ignored unless `epoch` is above the epoch of the role that the instance has.
    """

    role: Role
    epoch: int


@cheap_dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renews the session's lease; the instance's heartbeat carries its load.

    With several schedulers, the instance also sends a heartbeat when blocks of a prompt become free, so that no
    scheduler has to wait for the next regular one.
    """

    load: LoadSnapshot | None = None


@cheap_dataclass(frozen=True, slots=True)
class SessionOpen:
    """The instance accepted the session."""

    instance_id: str
    epoch: int
    load: LoadSnapshot


@cheap_dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to Reserve."""

    prompt_id: str
    ticket: Ticket
    seconds: float = 0.0


@cheap_dataclass(frozen=True, slots=True)
class PrefillHeld:
    """From a worker of another engine: it holds the prompt's KV once for each sequence, for at most `lease_s`."""

    prompt_id: str
    references: tuple[Any, ...]
    lease_s: float
    times: StageTimes


@cheap_dataclass(frozen=True, slots=True)
class PrefillBegun:
    """From a worker of another engine: it computes the prompt, and decode can wait for the KV; HandedOff follows.

    From then on the KV is kept for at most `lease_s`.
    """

    prompt_id: str
    references: tuple[Any, ...]
    lease_s: float


@cheap_dataclass(frozen=True, slots=True)
class Refused:
    """The instance refused the prompt and keeps nothing of it. `error` is the name of an error in wire.errors.

    `param` is the invalid field of the request, "" if the error names none.
    """

    prompt_id: str
    error: str
    message: str
    load: LoadSnapshot | None = None
    param: str = ""

    @classmethod
    def with_error(cls, prompt_id: str, error: PdserveError) -> "Refused":
        """Return the refusal of a prompt for an error."""
        return cls(prompt_id, to_name(error), str(error), param=getattr(error, "param", None) or "")


@dataclass(slots=True)  # not frozen, for the reason given at types.TokenLogprobs
class Step:
    """All new tokens of one step over all prompts, and the load after the step; split if over the message limit.

    A worker of another engine does not report its load with a step. `prompt_ids` are those of prompts that such a
    worker has rendered, before the prompt's first token.
    """

    tokens: tuple[TokenOutput, ...]
    load: LoadSnapshot | None
    times: tuple[tuple[str, StageTimes], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    prompt_ids: tuple[tuple[str, tuple[int, ...]], ...] = ()


@cheap_dataclass(frozen=True, slots=True)
class Adopted:
    """Answer to Adopt, with the id of the stream as `prompt_id`: the prompt as it came here, under the new epoch.

    Of the tokens that follow, the first `num_sent` were sent to earlier owners, who have counted them.
    """

    prompt_id: str
    prompt: PromptState
    num_sent: int = 0


@cheap_dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to ClaimRun. `stream_id` is that of the run that goes on; `answer` is empty if it was too large."""

    claim_id: str
    state: ClaimState
    stream_id: str = ""
    answer: bytes = b""


@cheap_dataclass(frozen=True, slots=True)
class HandedOff:
    """From P: the receiver acknowledged the KV and P released its blocks."""

    prompt_id: str
    times: StageTimes


@cheap_dataclass(frozen=True, slots=True)
class Pooled:
    """The result of a pooling prompt: the values of its `Pooling.kind`. The prompt is finished."""

    prompt_id: str
    values: tuple[float, ...]
    times: StageTimes


@cheap_dataclass(frozen=True, slots=True)
class Failed:
    """A prompt failed on this instance, which keeps nothing of it."""

    prompt_id: str
    error: str
    message: str


@cheap_dataclass(frozen=True, slots=True)
class LinkMeasured:
    """The current state of the link to a peer; `error` is the reason if it could not be measured, else empty."""

    peer_id: str
    link: LinkStatus | None
    error: str = ""


@cheap_dataclass(frozen=True, slots=True)
class RoleHeld:
    """The role that the instance has now; epoch 0 is that of the table.

    `answers` is the epoch of the SetRole that it answers, 0 at the start and for another scheduler's change; `error`
    is the reason if that changed nothing.
    """

    role: Role
    epoch: int
    answers: int = 0
    error: str = ""


@cheap_dataclass(frozen=True, slots=True)
class TableRead:
    """The instance uses the global table of this digest from now on."""

    digest: str


PromptCommand = Reserve | Prefill | Generate | PrefillAndHold | FetchAndGenerate
"""Every command with a `prompt`; each is checked before it is sent, and refused without closing the session."""
Command = OpenSession | PromptCommand | Cancel | Adopt | ClaimRun | EndClaim | MeasureLink | SetRole | Heartbeat
Answer = Reserved | Adopted | PrefillHeld | PrefillBegun | Refused | HandedOff | Pooled | Failed
"""Every event about one prompt, except Step."""
Event = SessionOpen | Step | Answer | Claimed | LinkMeasured | RoleHeld | TableRead | Heartbeat
