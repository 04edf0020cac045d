"""Write the tests' broken inputs into docs: a page of all of them, and the rules in both languages."""

from collections.abc import Iterator
from pathlib import Path

from ranktable_tools.rules.catalogue import LINT_RULES
from tests.docs.broken_input import Broken, answer
from tests.docs.broken_inputs import SECTIONS
from tests.ranktable_tools.rules_in_chinese import RULES_IN_CHINESE
from tests.ranktable_tools.rules_in_english import ACROSS_RULES, KEY_RULES, READING_RULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- Made by scripts/broken-inputs from the tests' broken inputs; do not edit. -->"
END = "<!-- End of what scripts/broken-inputs made. -->"
_NOTES = ("no-local", "port-differs", *KEY_RULES)
_HEAD = """\
# Broken inputs

What each says, as `scripts/broken-inputs` runs it: the message, and the exit status. Nothing is written then. A code in
brackets is that of a [rule](ranktable.md#rules). TIME stands for the time of day.
"""


def pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    english, chinese = DOCS / "ranktable.md", DOCS / "ranktable.zh-CN.md"
    return {
        DOCS / "broken-inputs.md": "\n".join((BEGIN, "", _HEAD, *_tables())),
        english: _put(english.read_text(), _rules()),
        chinese: _put(chinese.read_text(), _chinese_rules()),
    }


def _put(document: str, lines: Iterator[str]) -> str:
    """Return the document with these lines between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = "\n".join(lines)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _tables() -> Iterator[str]:
    for title, inputs in SECTIONS.items():
        yield f"## {title}\n"
        yield "| what is broken | what is said | status |"
        yield "|---|---|---|"
        for broken in inputs:
            reported = answer(broken)
            yield f"| {broken.what} | {_cell(reported.output)} | {reported.status} |"
        yield ""


def _rules() -> Iterator[str]:
    yield "## Rules\n"
    yield "| code | the rule | breaking it is |"
    yield "|---|---|---|"
    for code, description, is_note in rules():
        yield f"| `{code}` | {description} | {'a note' if is_note else 'an error'} |"


def _chinese_rules() -> Iterator[str]:
    yield "## 规则\n"
    yield "| 代码 | 规则 | 违反时 | 提示示例 |"
    yield "|---|---|---|---|"
    for code, _, is_note in rules():
        message = answer(_example(code)).output
        line = next(line for line in message.splitlines() if f"[{code}]" in line)
        yield f"| `{code}` | {RULES_IN_CHINESE[code]} | {'说明' if is_note else '错误'} | {_cell(line)} |"


def rules() -> Iterator[tuple[str, str, bool]]:
    """Yield code and sentence of each rule, and whether breaking it is a note."""
    for code, description in (*READING_RULES.items(), *KEY_RULES.items(), *ACROSS_RULES.items()):
        yield code, description, code in _NOTES
    for rule in LINT_RULES:
        yield rule.code, rule.description, rule.severity == "note"


def _example(code: str) -> Broken:
    return next(broken for inputs in SECTIONS.values() for broken in inputs if broken.rule == code)


def _cell(message: str) -> str:
    lines = message.replace("|", "\\|").splitlines()
    return "<br>".join(f"`` {line} ``" if "`" in line else f"`{line}`" for line in lines)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
