"""The one line that says how a request went: who served it, its sizes, its stages and its ending; never its text."""

from collections.abc import Iterable, Sequence

from scheduler.request import GenerationRequest, PromptDone
from telemetry.logs import EventLogger

_STAGES = ("queue", "reserve", "prefill", "send", "first_step")

log = EventLogger("requests")


def log_request(
    request: GenerationRequest, served: Sequence[PromptDone], *,
    ending: str, output_tokens: int, first_token_s: float | None, seconds: float,
) -> None:  # fmt: skip
    """Log a request that ended. Of several prompts, each stage's longest time; `-` where nothing is known."""
    stages = {f"{name}_ms": _longest_ms(name, served) for name in _STAGES}
    log.info(
        "request_done",
        request_id=request.request_id,
        ending=ending,
        path=_names(done.path for done in served),
        prefill=_names(done.prefill_instance for done in served),
        decode=_names(done.decode_instance for done in served),
        prompts=len(request.prompts),
        n=request.params.n,
        prompt_tokens=sum(map(len, request.prompts)),
        output_tokens=output_tokens,
        first_token_ms=_ms(first_token_s),
        total_ms=_ms(seconds),
        **stages,
        kv_bytes=sum(done.times.kv_bytes for done in served),
        kv_bytes_early=sum(done.times.kv_bytes_early for done in served),
    )


def _longest_ms(stage: str, served: Sequence[PromptDone]) -> str:
    known = [seconds for done in served if (seconds := getattr(done.times, f"{stage}_s")) is not None]
    return _ms(max(known, default=None))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _names(names: Iterable[str | None]) -> str:
    return ",".join(dict.fromkeys(name for name in names if name)) or "-"
