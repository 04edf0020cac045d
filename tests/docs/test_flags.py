"""docs/flags.md equals the page generated from the table of flags."""

from pathlib import Path

from pdserve.flags.page import page

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "flags.md"


def test_the_page_is_generated_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m pdserve.flags.page > docs/flags.md"
