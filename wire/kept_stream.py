"""A stream that outlives the session of its scheduler: its tokens, its owner epoch, and how long it may run unowned.

owned --session lost--> orphan: runs on --adopted, under a higher owner epoch--> owned by another session
                          |-- after OpenSession.orphan_s or ORPHAN_TOKENS without an owner --> freed
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from wire.errors import PdserveError, StreamMoved, Unavailable, UnknownStream
from wire.event_sink import EventSink
from wire.messages import Adopt, Adopted, Failed, Refused
from wire.types import PromptState, ResumableStream, TokenOutput

ORPHAN_TOKENS = 4096
MAX_KEPT_BYTES = 64 * 2**20
"""The limit for one API key on one instance. Above it the oldest finished streams are forgotten; if the unfinished ones
still exceed it, no new stream is kept."""
_TOKEN_BYTES = 256


class KeptStream:
    """Owner of the tokens that a prompt has generated on this instance. `state` is the prompt as it came here."""

    def __init__(self, state: PromptState) -> None:
        assert state.stream is not None
        self.state = state
        self.stream = state.stream
        self.tokens: list[TokenOutput] = []
        self.is_finished = False
        self._is_forgotten = False
        self._num_sent = 0  # of `tokens`, to a session that was open
        self._num_unowned = 0

    @property
    def num_bytes(self) -> int:
        """About how much memory it occupies."""
        return len(self.stream.request) + _TOKEN_BYTES * len(self.tokens)

    @property
    def has_output(self) -> bool:
        """Whether a client may have some of it and may get the rest; else nobody needs it."""
        return not self._is_forgotten and bool(self.tokens or any(self.state.outputs))

    def add(self, token: TokenOutput, *, owned: bool) -> bool:
        """Keep a token; return whether the stream may run on."""
        self.tokens.append(token)
        self.is_finished |= token.finish is not None
        self._num_sent += owned
        self._num_unowned = 0 if owned else self._num_unowned + 1
        return self._num_unowned < ORPHAN_TOKENS

    def forget(self) -> None:
        """Drop the tokens: the stream cannot be adopted any more."""
        self._is_forgotten = True
        self.tokens.clear()
        self.stream = replace(self.stream, request=b"")
        self.state = replace(self.state, stream=self.stream, token_ids=())

    def is_current(self, owner_epoch: int) -> bool:
        """Return whether a command of this epoch comes from the owner."""
        return owner_epoch == self.stream.owner_epoch

    def adopt(self, command: Adopt) -> Adopted:
        """Raise the owner epoch and return the answer. Raises StreamMoved for an epoch that is not the current one."""
        epoch = self.stream.owner_epoch
        if command.owner_epoch is not None and not self.is_current(command.owner_epoch):
            raise StreamMoved(f"stream {self.stream.stream_id} is owned under epoch {epoch}, not {command.owner_epoch}")
        self.stream = replace(self.stream, owner_epoch=epoch + 1)
        self.state = replace(self.state, stream=self.stream)
        num_sent, self._num_sent = self._num_sent, len(self.tokens)
        return Adopted(self.stream.stream_id, self.state, num_sent)


class StreamRecord(Protocol):
    """What an instance knows of one of its prompts: its owner, and its stream if it may be resumed."""

    owner: EventSink
    kept: KeptStream | None


def keep_stream(state: PromptState, others: Iterable[StreamRecord]) -> KeptStream | None:
    """Return the stream of a prompt, None if it has none or its key has too much kept already."""
    if state.stream is None:
        return None
    streams = [one.kept for one in others if one.kept is not None and one.kept.stream.tenant == state.stream.tenant]
    num_bytes = sum(one.num_bytes for one in streams)
    for one in streams:
        if num_bytes >= MAX_KEPT_BYTES and one.is_finished:
            num_bytes -= one.num_bytes
            one.forget()
    return KeptStream(state) if num_bytes < MAX_KEPT_BYTES else None


def adopt_stream(
    owner: EventSink, command: Adopt, records: Iterable[StreamRecord], arriving: Iterable[PromptState]
) -> tuple[TokenOutput, ...]:
    """Make `owner` the owner of the stream that `command` names, notify both owners, and return the tokens so far.

    Emits Refused for a stream that is not here, or is among those `arriving`: not handed off yet.
    """
    try:
        kept, record = _find_stream(command, records, arriving)
        answer = kept.adopt(command)
    except PdserveError as error:
        owner.emit(Refused.with_error(command.stream_id, error))
        return ()
    before, record.owner = record.owner, owner
    before.emit(Failed(kept.state.prompt_id, StreamMoved.__name__, "another scheduler has adopted the stream"))
    owner.emit(answer)
    return tuple(kept.tokens)


def _find_stream(
    command: Adopt, records: Iterable[StreamRecord], arriving: Iterable[PromptState]
) -> tuple[KeptStream, StreamRecord]:
    """Return the stream that `command` names: the newest, if an earlier attempt was lost here.

    Raises UnknownStream, or Unavailable for one that is arriving.
    """

    def is_wanted(stream: ResumableStream | None) -> bool:
        return stream is not None and (stream.stream_id, stream.tenant) == (command.stream_id, command.tenant)

    found = [
        (kept, record)
        for record in records
        if (kept := record.kept) is not None and kept.has_output and is_wanted(kept.stream)
    ]
    if not found and any(is_wanted(state.stream) for state in arriving):
        raise Unavailable("the stream is being handed off")
    if not found:
        raise UnknownStream(f"no stream {command.stream_id[:40]} is kept here for this key")
    return max(found, key=lambda one: one[0].stream.owner_epoch)
