"""Report each finished request; its log line has instances, sizes, stage times and outcome; never its text."""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence

from scheduler.observability.request_done import RequestDone
from scheduler.request import PromptDone
from telemetry.logs import EventLogger
from wire.errors import Cancelled, InvalidGrammar, StreamMoved, UnknownModel
from wire.types import STAGES

_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$))""", re.DOTALL)
_TEMPLATE_WORDS = re.compile(r"(the chat template cannot render this: \w+)\b.*", re.DOTALL)

_log = EventLogger("requests")


class Reporting:
    """Reports the request that ran in the `with` block: passes `done(outcome, error name)` to `observe` and logs it."""

    __slots__ = ("_done", "_observe")

    def __init__(self, observe: Callable[[RequestDone], None], done: Callable[[str, str], RequestDone]) -> None:
        self._observe, self._done = observe, done

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Report."""
        outcome, error = "finished" if kind is None else "failed", ""
        if kind is not None and issubclass(kind, (asyncio.CancelledError, Cancelled, StreamMoved)):
            outcome = "cancelled"  # the end of a stream that moved is counted by another scheduler
        elif kind is not None and issubclass(kind, Exception):
            error = kind.__name__
        finished = self._done(outcome, error)
        self._observe(finished)
        if _log.has_info:
            log_request(finished)


def log_request(done: RequestDone) -> None:
    """Log a finished request: with several prompts, the longest time of each stage; `-` for unknown values."""
    request, served = done.request, done.served
    stages = {f"{name}_ms": _longest_ms(name, served) for name in STAGES}
    _log.info(
        "request_done",
        request_id=request.request_id,
        ending=done.outcome,
        path=_names(one.path for one in served),
        prefill=_names(one.prefill_instance for one in served),
        decode=_names(one.decode_instance for one in served),
        prompts=len(request.prompts),
        n=request.params.n,
        prompt_tokens=done.num_prompt_tokens,
        output_tokens=done.num_output_tokens,
        first_token_ms=_to_ms(done.first_token_s),
        total_ms=_to_ms(done.seconds),
        **stages,
        kv_bytes=sum(one.times.kv_bytes for one in served),
        kv_bytes_early=sum(one.times.kv_bytes_early for one in served),
        **({"retried_prompts": retried} if (retried := sum(one.tries > 1 for one in served)) else {}),
        **({"error": done.error} if done.error else {}),
    )


def without_values(error: BaseException) -> str:
    """Return an error's message without the text that it quotes, except a model's name: the log contains no prompts."""
    if isinstance(error, UnknownModel):
        return str(error)
    if isinstance(error, InvalidGrammar):
        return "invalid structured output options; the client got the reason"  # libraries' messages quote the grammar
    return _TEMPLATE_WORDS.sub(r"\1", _QUOTED.sub("'…'", str(error)))


def _longest_ms(stage: str, served: Sequence[PromptDone]) -> str:
    known = [seconds for done in served if (seconds := getattr(done.times, f"{stage}_s")) is not None]
    return _to_ms(max(known, default=None))


def _to_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _names(names: Iterable[str | None]) -> str:
    return ",".join(dict.fromkeys(name for name in names if name)) or "-"
