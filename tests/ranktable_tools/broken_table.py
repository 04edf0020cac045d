"""Write the table of broken inputs into docs/ranktable.md: run each, and note what the command says and its status."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ranktable_tools.cli import main
from ranktable_tools.rules.catalogue import ACROSS_RULES, KEY_RULES, READING_RULES, TABLE_RULES
from tests.ranktable_tools.broken_inputs import SECTIONS, Broken

BEGIN = "<!-- Made by scripts/broken-inputs from tests/ranktable_tools/broken_inputs.py; do not edit. -->"
END = "<!-- End of what scripts/broken-inputs made. -->"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ranktable.md"


def answer(broken: Broken) -> tuple[str, int, list[str]]:
    """Run one input in a folder of its own; return what was said, the exit status, and the files that came new."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in broken.files:
            Path(name).write_text(broken.text(name))
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(broken.arguments)
        new = sorted(set(os.listdir()) - set(broken.files))
    return said.getvalue().strip(), status, new


def rendered() -> str:
    """Return the section: a table for each kind of input."""
    return "\n".join(_lines())


def written(document: str) -> str:
    """Return the document with the section in its place."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rendered()}\n{END}{after}"


def _lines() -> Iterator[str]:
    yield "## Rules\n"
    yield "| code | the rule | breaking it is |"
    yield "|---|---|---|"
    for code, says in (*READING_RULES.items(), *KEY_RULES.items(), *ACROSS_RULES.items()):
        yield f"| `{code}` | {says} | {'a note' if code in ('no-local', *KEY_RULES) else 'an error'} |"
    for rule in TABLE_RULES:
        yield f"| `{rule.code}` | {rule.says} | {'a note' if rule.severity == 'note' else 'an error'} |"
    yield "\n## Broken inputs\n"
    yield "What each says today, run by `scripts/broken-inputs`. The code in brackets is the rule's.\n"
    for title, inputs in SECTIONS.items():
        yield f"### {title}\n"
        yield "| what is broken | what is said | status |"
        yield "|---|---|---|"
        for broken in inputs:
            said, status, _ = answer(broken)
            yield f"| {broken.what} | {_cell(said)} | {status} |"
        yield ""


def _cell(said: str) -> str:
    return "<br>".join(f"`{line}`" for line in said.replace("|", "\\|").splitlines())


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
