"""What becomes of a request's output tokens: how they turn into text, and the pieces in which it leaves."""

from dataclasses import dataclass, field

from scheduler.request import NewToken


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text. `silent_stop_ids` end a choice without being its stop_reason (EOS).

    `echo`, where given, has the text of each prompt, which is put before each of its choices. With `prompt_only` there
    is nothing else: the one token that is computed behind the prompt is neither told nor counted.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    silent_stop_ids: frozenset[int] = field(default_factory=frozenset)
    continues_prompt: bool = False
    echo: tuple[str, ...] = ()
    prompt_only: bool = False


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class TextPiece:
    """New text of choice `index` (prompt * n + place among its choices); `finish_reason` is set on its last piece.

    `tokens` came since the choice's last piece: text may be held back that they began. `cumulative_logprob` sums the
    log probabilities of all the choice's tokens so far, None where they are not known.
    """

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: tuple[NewToken, ...] = ()
    cumulative_logprob: float | None = None
