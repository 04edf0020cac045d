"""The rest of a stream for a client that has its first events: those are skipped, and nothing is counted twice."""

from scheduler.api.answer_writer import AnswerWriter
from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone
from scheduler.text_output import Dispatch, Observer
from wire.cheap_dataclass import cheap_dataclass

NO_EVENTS = (b":", b"event: ping")
"""How parts of a stream begin that are no events."""


@cheap_dataclass(frozen=True, slots=True)
class Resumed:
    """Where a client continues: after so many events. `run` runs the request from its first token.

    Earlier schedulers have counted `num_counted` of its tokens.
    """

    run: Dispatch
    after: int
    num_counted: int


class SkippedEvents:
    """An answer without its first `num_events` events; comments among them are skipped too, its last event never."""

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


class ResumedObserver:
    """Observes a stream that earlier schedulers have observed up to a token. Implements Observer.

    If that was its last token, they have counted its end too.
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
        """Count the path of the rest."""
        if self._has_new:
            self._observer.prompt_done(done)

    def request_done(self, done: RequestDone) -> None:
        """Count the end of the request."""
        if self._has_new:
            self._observer.request_done(done)

    def _is_new(self) -> bool:
        self._has_new = not self._num_left
        self._num_left -= not self._has_new
        return self._has_new
