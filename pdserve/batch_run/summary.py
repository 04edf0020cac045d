"""The last line of a batch, and the command that resumes it. Pure."""

import re
import shlex
from collections.abc import Sequence

from remote_files.redaction import redacted

KEY = "KEY"


def command_again(command: Sequence[str], argv: Sequence[str]) -> str:
    """Return the command line that resumes a batch: the same one, with secrets removed."""
    shown, hides = [], False
    for word in argv:
        flag, value = _split_flag(word)
        is_key = flag.rstrip("=").replace("_", "-") == "--api-key"
        shown.append(KEY if hides else flag + (KEY if is_key and value else redacted(value)))
        hides = is_key and not flag.endswith("=")
    return shlex.join([*command, *shown])


def _split_flag(word: str) -> tuple[str, str]:
    """Return a flag with its `=`, and the value in the same word; for other words an empty flag and the word."""
    found = re.match(r"--[^=]*=?|-[A-Za-z]=?", word)
    return ("", word) if found is None else (found[0], word[found.end() :])


def counted(done: int, errors: int, seconds: float, tokens: float) -> str:
    """Return the number of lines answered, the duration and the output tokens per second."""
    lines = f"{done:,} line{'' if done == 1 else 's'}"
    wrong = f"{errors:,} error{'' if errors == 1 else 's'}"
    return f"{lines} answered ({wrong}) in {seconds:.1f} s, {tokens:.1f} tokens/s"
