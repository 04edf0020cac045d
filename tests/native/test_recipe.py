"""A library's cache key covers its sources, the files they include, and the flags."""

from pathlib import Path

import pytest

from native import recipe
from native.recipe import Recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources: a.c includes a.h, which includes b.h and a system header; c.c and c.h belong to another library."""
    contents = {
        "a.c": '#include "a.h"\n',
        "a.h": '  #  include "b.h"\n#include <math.h>\n',
        "b.h": "",
        "c.c": "",
        "c.h": "",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(recipe, "FOLDER", tmp_path)
    return tmp_path


def make(*flags: str) -> Recipe[Path]:
    return Recipe("a", ("a.c",), lambda path: path, flags=flags)


@pytest.mark.parametrize("name", ["a.c", "a.h", "b.h"])
def test_the_key_changes_with_every_compiled_or_included_file(folder: Path, name: str) -> None:
    before = make().key()
    with (folder / name).open("a") as file:
        file.write("/* more */\n")

    assert make().key() != before


def test_the_key_does_not_change_with_other_files(folder: Path) -> None:
    before = make().key()
    (folder / "c.h").write_text("/* more */\n")

    assert make().key() == before


def test_the_key_changes_with_the_flags(folder: Path) -> None:
    assert make("-O2").key() != make("-O3").key()
