"""What a broken input is, for the tests of every package and for docs/broken-inputs.md, and how it is run."""

import contextlib
import functools
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ranktable_tools import cli

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


@dataclass(frozen=True)
class Command:
    """A command: runs its arguments in this process and returns the exit status; its errors begin with `begins`.

    For one that needs its own process it is a function that runs that, with a deadline, and prints the output.
    """

    run: Callable[[Sequence[str]], int]
    begins: str


RANKTABLE = Command(cli.main, "ranktable: ")


@dataclass(frozen=True, eq=False)
class Broken:
    """One broken input: what is broken, the files in the folder that it is tried in, the words typed there.

    `rule` is the code that lint prints, None for what is refused in one line that begins as its command's errors do.
    The environment has PATH and what `environ` says.
    """

    what: str
    rule: str | None
    files: Mapping[str, dict[str, Any] | list[object] | str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    command: Command = RANKTABLE
    environ: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The text of one of its files."""
        document = self.files[name]
        return document if isinstance(document, str) else json.dumps(document)


@dataclass(frozen=True)
class Answer:
    """The output for a broken input, the exit status, and the new files."""

    output: str
    status: int
    new: tuple[str, ...]


@functools.cache
def answer(broken: Broken) -> Answer:
    """Run one, once, in its own folder; in the output the folder's path is left out, and times are the word TIME."""
    output = io.StringIO()
    environ = {"PATH": os.environ["PATH"], **broken.environ}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), patch.dict(os.environ, environ, clear=True):
        for name in broken.files:
            Path(name).write_text(broken.text(name))
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = broken.command.run(broken.arguments)
        new = sorted(set(os.listdir()) - set(broken.files))
    plain = output.getvalue().replace(f"{folder}/", "").strip()
    return Answer(_TIME.sub("TIME", plain), status, tuple(new))
