"""What a batch says at its end, and how to go on after it was stopped. Pure."""

import shlex
from collections.abc import Sequence

from batch.redaction import redacted

KEY = "KEY"


def command_again(command: Sequence[str], argv: Sequence[str]) -> str:
    """Return the command line that goes on with a batch: the very one, but for what is secret in it."""
    shown, hides = [], False
    for word in argv:
        flag, equals, value = word.partition("=")
        if hides:
            shown.append(KEY)
        elif flag == "--api-key" and equals:
            shown.append(f"{flag}={KEY}")
        elif flag.startswith("-") and equals:
            shown.append(f"{flag}={redacted(value)}")
        else:
            shown.append(redacted(word))
        hides = word == "--api-key"
    return shlex.join([*command, *shown])


def counted(done: int, errors: int, seconds: float, tokens: float) -> str:
    """Return how many lines were answered, in how many seconds, at how many output tokens a second."""
    lines = f"{done:,} line{'' if done == 1 else 's'}"
    wrong = f"{errors:,} error{'' if errors == 1 else 's'}"
    return f"{lines} answered ({wrong}) in {seconds:.1f} s, {tokens:.1f} tokens/s"
