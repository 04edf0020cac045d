"""Stop strings in `pdserve verify --features`: choose one for a prompt, and check the text before it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdserve.feature_judges import Answers, CasePrompt, Judge
from scheduler.text.choice import Choice
from scheduler.text.pieces import TextOptions
from scheduler.tokens import Tokens
from wire.types import TokenOutput

if TYPE_CHECKING:
    from engine.reference_decoding import ReferenceDecoder

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"
_LONGEST = 8  # characters of a stop string


class StoppedText:
    """The text of a prompt's only sequence as a client gets it: up to its first stop string."""

    def __init__(self, prompt: CasePrompt, tokens: Tokens) -> None:
        self._choice = Choice(0, prompt.token_ids, tokens, TextOptions(stops=prompt.stops))
        self.text = ""

    def push(self, token: TokenOutput) -> bool:
        """Append the next token; return False if it completes a stop string or is the last."""
        piece = self._choice.push(token)
        self.text += piece.text if piece is not None else ""
        return not self._choice.finished


def choose_stop(token_ids: Sequence[int], decode: Decode) -> str | None:
    """Return the shortest text whose first occurrence is between the middle and the last quarter of these tokens."""
    text = decode(token_ids)
    first, end = len(decode(token_ids[: len(token_ids) // 2])), len(decode(token_ids[: len(token_ids) * 3 // 4]))
    for length in range(1, _LONGEST + 1):
        for at in range(first, end - length):
            stop = text[at : at + length]
            if _BROKEN not in stop and text.find(stop) == at:
                return stop
    return None


def ends_before_stop(decode: Decode) -> Judge:
    """Return a judge that checks that text and tokens are the reference's up to the stop string and end there."""

    def judge(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            whole = decoder.decode(prompt.token_ids, prompt.params)[0].token_ids
            text, ids = decode(whole), answer.sequences[0] if answer.sequences else ()
            wanted = text[: text.find(prompt.stops[0])]
            if answer.text != wanted:
                return f"prompt {number}: {answer.text!r} in place of {wanted!r}"
            if ids != whole[: len(ids)] or prompt.stops[0] in decode(ids[:-1]) or prompt.stops[0] not in decode(ids):
                return f"prompt {number}: {ids} are not the tokens of {whole} up to {prompt.stops[0]!r}"
        return None

    return judge
