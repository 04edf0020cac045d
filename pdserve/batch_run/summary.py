"""What a batch says at its end, and how to go on after it was stopped. Pure."""

import re
import shlex
from collections.abc import Sequence

from batch.redaction import redacted

KEY = "KEY"


def command_again(command: Sequence[str], argv: Sequence[str]) -> str:
    """Return the command line that goes on with a batch: the very one, but for what is secret in it."""
    shown, hides = [], False
    for word in argv:
        flag, value = _parted(word)
        is_key = flag.rstrip("=").replace("_", "-") == "--api-key"
        shown.append(KEY if hides else flag + (KEY if is_key and value else redacted(value)))
        hides = is_key and not flag.endswith("=")
    return shlex.join([*command, *shown])


def _parted(word: str) -> tuple[str, str]:
    """Return a flag, with the = behind it, and what stands in the same word; of another word, all of it last."""
    found = re.match(r"--[^=]*=?|-[A-Za-z]=?", word)
    return ("", word) if found is None else (found[0], word[found.end() :])


def counted(done: int, errors: int, seconds: float, tokens: float) -> str:
    """Return how many lines were answered, in how many seconds, at how many output tokens a second."""
    lines = f"{done:,} line{'' if done == 1 else 's'}"
    wrong = f"{errors:,} error{'' if errors == 1 else 's'}"
    return f"{lines} answered ({wrong}) in {seconds:.1f} s, {tokens:.1f} tokens/s"
