"""Find private words in prose, and public class names that two modules share: `python scripts/words.py [PATH...]`.

Prose is what a person reads: docstrings, comments, the texts of logs and errors, names of log events and of tests, and
Markdown outside its code. Names of metrics, flags, config keys and wire fields are contracts, and are not looked at.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

INSTEAD = {
    r"told(?! apart)": "reported, passed, emitted, sent",
    r"tells?(?! \w+ apart| them apart)": "reports, passes, shows, distinguishes",
    r"sa(?:id|ys?|ying) of": "returns, reports for",
    r"ask(?:s|ed|ing)? for": "requested, needed, options",
    r"wish(?:es|ed)?": "options, specification, request",
    r"sought": "queried",
    r"put aside": "preempted, swapped out",
    r"books|roster|tally": "in-flight ledger, batch state, counts",
    r"edges": "bucket boundaries",
    r"endings?|what ended it": "finish, finish reason",
    r"(?<!front.)(?<!pdserve.)doors?": "endpoint, admin socket, listener",
    r"in words": "with a message",
    r"likelihoods?": "logprob, log probability",
    r"whom(?:ever)?|whoever|who takes it": "the receiver, the owner, the caller (name it)",
    r"openers?|answerers?|askers?": "client, server",
    r"parted": "separated",
    r"mend(?:s|ed|ing)?": "fix",
    r"strangers?": "unknown peer, other client",
    r"deaf|mute": "does not read, does not write",
    r"lends?|lent": "shares, passes",
    r"till": "until",
    r"plainly": "clearly",
    r"seats?": "placement, sequence, batch slot",
    r"put(?:s|ting)? off": "unassign, postpone",
    r"unjoined": "without a common transport",
}
"""A private word, as a regular expression, and the field's terms for it."""
ALLOWED = {
    ("docs/metrics.md", "sought"),  # part of metrics' names
    ("ranktable_tools/containers/base_image.py", "asked for"),  # two lines of a shell script
    ("tests/scheduler/test_operations.py", "ending"),  # a field of the request log
    ("tests/conformance/printed.py", "tell"),  # a prompt that a guide prints
}
"""(file, match): a contract's name, or plain English there."""
SHARED_CLASSES = {"SamplingParams"}
"""Public classes that may have one name: vLLM's of the offline API, and the wire's."""
_ROOT = Path(__file__).parents[1]
_PRODUCT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
_EXEMPT = re.compile(r"_pb2|zh-CN|^docs/(adr/|log\.md$|(conformance|broken-inputs)\.md$)|^CHANGELOG\.md$|words\.py$")
"""Generated code, translations, history, pages made from tests' names, this file and its test."""
_MIN_WORDS = 3
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.*?``|`[^`]*`|https?://\S+|\]\([^)]*\)")
_GAP = r"[\s\"'fru#]+"
_ANYWHERE = re.compile(
    rf"\b(?:{'|'.join(re.sub(r'[(][?]<?!.*?[)]', '', word).replace(' ', _GAP) for word in INSTEAD)})\b"
)
"""Matches a lower-cased file where a private word may be, in code too; most files have none and are not parsed."""


def main(argv: Sequence[str]) -> int:
    """Print the findings; return 1 if there are any."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *argv], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [*check(listed), *([] if argv else shared_classes(listed))]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def check(names: Sequence[str]) -> list[str]:
    """Return a line for each private word in the prose of these files."""
    return [line for name in names if not _EXEMPT.search(name) for line in _private_words(name)]


def _private_words(name: str) -> Iterator[str]:
    for line, text in prose_of(name):
        prose = _CODE.sub(lambda code: "`" * len(code[0]), text)
        for word, instead in INSTEAD.items():
            for match in re.finditer(rf"\b(?:{word})\b".replace(" ", r"\s+"), prose, re.IGNORECASE):
                phrase = " ".join(match[0].lower().split())
                if (name, phrase) not in ALLOWED:
                    yield f"{name}:{line + text.count(chr(10), 0, match.start())}: {phrase!r}: write {instead}"


def prose_of(name: str) -> Iterator[tuple[int, str]]:
    """Yield (line of its start, text) of each piece of prose in a file."""
    path = Path(name)
    match path.suffix:
        case ".py":
            source = path.read_text()
            if _ANYWHERE.search(re.sub(r"_|\\[nrt]", " ", source.lower())):
                yield from _python_prose(source)
        case ".c" | ".h":
            source = path.read_text()
            for comment in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
                yield source.count("\n", 0, comment.start()) + 1, comment[0]
        case ".md":
            yield 1, _FENCED.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())


def _python_prose(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if len(text.split()) >= _MIN_WORDS:
                yield node.lineno, text
            case ast.Call(
                func=ast.Attribute(attr="debug" | "info" | "warning" | "error"),
                args=[ast.Constant(value=str(event)), *_],
            ):
                yield node.lineno, event.replace("_", " ")
            case ast.FunctionDef(name=test) | ast.AsyncFunctionDef(name=test) if test.startswith("test_"):
                yield node.lineno, test.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def shared_classes(names: Sequence[str]) -> list[str]:
    """Return a line for each public class name that several modules of the product define."""
    modules = defaultdict(list)
    for name in names:
        if name.split("/")[0] in _PRODUCT and name.endswith(".py") and "_pb2" not in name:
            for node in ast.parse(Path(name).read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(name)
    return [
        f"{where[0]}: class {one} is also in {', '.join(where[1:])}: one name, one class"
        for one, where in sorted(modules.items())
        if len(where) > 1 and one not in SHARED_CLASSES
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
