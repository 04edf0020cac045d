"""docs/models.md lists the model types that the tests find exact, and those that are refused, with the messages."""

import re
from pathlib import Path

from tests.engine.refused_families import REFUSED
from tests.engine.tiny_families import NAMED, OTHERS
from tests.engine.tiny_vision_models import VISION

_PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
_NAME = re.compile(r"`([\w-]+)`")


def _rows(section: str) -> list[list[str]]:
    """Return the cells of the section's table, without its head."""
    text = _PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_exact_models_are_those_of_every_test_run() -> None:
    assert [_NAME.findall(row[0])[0] for row in _rows("Exact")] == list(NAMED)


def test_the_models_for_images_are_those_of_the_tests() -> None:
    assert [_NAME.findall(row[0])[0] for row in _rows("Images")] == list(VISION)


def test_the_other_models_are_those_of_the_long_run() -> None:
    listed = _PAGE.split("scripts/test --all`:\n\n")[1].split("\n\n")[0]

    assert _NAME.findall(listed) == list(OTHERS)


def test_refused_models_are_listed_with_their_messages() -> None:
    listed = {name: row[1] for row in _rows("Refused") for name in _NAME.findall(row[0])}

    assert listed == {name: words.replace("\\", "") for name, (words, _) in REFUSED.items()}
