"""The rest of a stream for a client that has its first events: those are skipped, and nothing is counted twice."""

from scheduler.api.answer_writer import AnswerWriter
from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone
from scheduler.text_output import Dispatch, Observer
from wire.cheap_dataclass import cheap_dataclass
from wire.claim_table import MAX_KEPT_ANSWER

NO_EVENTS = (b":", b"event: ping")
"""The beginnings of the parts of a stream that are not events."""


@cheap_dataclass(frozen=True, slots=True)
class Resumed:
    """Where a client continues: after `after` events. `run` runs the request from its first token.

    Earlier schedulers have counted the request's first `num_counted` tokens.
    """

    run: Dispatch
    after: int
    num_counted: int


class SkippedEvents:
    """An answer without its first `num_events` events and the comments among them; the last event is always sent."""

    def __init__(self, answer: AnswerWriter, num_events: int) -> None:
        self.start = answer.start
        self._answer, self._num_left = answer, num_events

    def write(self, content: bytes) -> None:
        """Write the part of `content` that the client does not have."""
        self._answer.write(self._rest_of(content))

    async def end(self, content: bytes) -> None:
        """Write the last part, of which the last event is an error or the end mark, and end the answer."""
        last = content.rfind(b"\n\n", 0, -2)
        at = 0 if last < 0 else last + 2
        await self._answer.end(self._rest_of(content[:at]) + content[at:])

    def _rest_of(self, content: bytes) -> bytes:
        while self._num_left and content:
            first, _, content = content.partition(b"\n\n")
            self._num_left -= not first.startswith(NO_EVENTS)
        return content


class CopiedEvents:
    """An answer of which `content` is a copy, up to the limit of answers that are kept."""

    def __init__(self, answer: AnswerWriter | SkippedEvents) -> None:
        self.start = answer.start
        self.content = bytearray()
        self._answer = answer

    def write(self, content: bytes) -> None:
        """Write a part."""
        self._copy(content)
        self._answer.write(content)

    async def end(self, content: bytes) -> None:
        """Write the last part."""
        self._copy(content)
        await self._answer.end(content)

    def _copy(self, content: bytes) -> None:
        if len(self.content) <= MAX_KEPT_ANSWER:
            self.content += content


class ResumedObserver:
    """Observes a stream whose first `num_counted` tokens earlier schedulers have counted. Implements Observer.

    If these are all its tokens, the earlier schedulers have counted the end of the request too.
    """

    def __init__(self, observer: Observer, num_counted: int) -> None:
        self._observer, self._num_left = observer, num_counted
        self._has_new = False

    def first_token_came(self, request: GenerationRequest, seconds: float) -> None:
        """Count the prompt, unless its first token was counted before."""
        if not self._num_left:
            self._observer.first_token_came(request, seconds)

    def choice_started(self) -> None:
        """Count the first token."""
        if self._is_new():
            self._observer.choice_started()

    def token_gap(self, seconds: float) -> None:
        """Count another token."""
        if self._is_new():
            self._observer.token_gap(seconds)

    def prompt_done(self, done: PromptDone) -> None:
        """Count the prompt's path, unless all its tokens were counted before."""
        if self._has_new:
            self._observer.prompt_done(done)

    def request_done(self, done: RequestDone) -> None:
        """Count the end of the request, unless all its tokens were counted before."""
        if self._has_new:
            self._observer.request_done(done)

    def _is_new(self) -> bool:
        self._has_new = not self._num_left
        self._num_left -= not self._has_new
        return self._has_new
