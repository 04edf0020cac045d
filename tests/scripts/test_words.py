"""Private words are found in prose and in names of tests and log events, and class names that two modules share."""

from pathlib import Path

import pytest

from scripts import words


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("docs/a.md", "The receiver is told of it.", ["told"]),
        ("docs/a.md", "Two cases can be told apart.", []),
        ("docs/a.md", "The field `told` and\n```\nthe books\n```\n", []),
        ("engine/a.py", '"""Return what was\nasked for."""\n', ["asked for"]),
        ("engine/a.py", 'told = asked(sought="in words")  # whoever asks for it\n', ["asks for", "whoever"]),
        ("engine/a.py", 'raise ValueError(f"{name}: ask for fewer tokens")\n', ["ask for"]),
        ("engine/a.py", 'FLAG = "--sought"\n', []),
        ("native/a.c", "int told; /* the strangers */ // till then\n", ["strangers", "till"]),
        ("engine/a.py", '_log.warning("rank_told", rank="told", reason=error)\n', ["told"]),
        ("engine/a.py", 'log.info(event, what="is_told")\n', []),
        ("engine/a.py", "def told() -> None: ...\n", []),
        ("tests/flags/test_a.py", "def test_it_is_asked_for() -> None: ...\n", ["asked for"]),
        ("tests/flags/test_a.py", '"""Told of it."""\nassert told, "it was not told"\n', ["told", "told"]),
        ("docs/a.zh-CN.md", "told", []),
    ],
)
def test_private_words_are_found_in_prose(
    name: str, text: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)

    assert sorted(line.split("'")[1] for line in words.check([name])) == found


def test_a_public_class_name_in_two_modules_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wire/a.py", "engine/b.py", "tests/c.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("class Piece: ...\nclass _Piece: ...\nclass SamplingParams: ...\n")
    monkeypatch.chdir(tmp_path)

    (line,) = words.shared_classes(["wire/a.py", "engine/b.py", "tests/c.py"])

    assert line == "wire/a.py: class Piece is also in engine/b.py: one name, one class"
