"""Every file that the documents name is there, and every link in them leads to one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
NAMED = re.compile(rf"(?<![\w/.}}>-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _missing(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    named = [(ROOT / name, name) for name in NAMED.findall(text)]
    linked = [(page.parent / link, link) for link in LINK.findall(text) if "://" not in link]
    return [name for path, name in (*named, *linked) if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert _missing(page) == []


def test_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`docs/hand-off.md`, `kvtransfer/no_such.py`, [gone](gone.md), [site](https://example.org/x.md)\n")

    assert _missing(page) == ["kvtransfer/no_such.py", "gone.md"]


def test_every_page_is_found_from_the_readme() -> None:
    """A reader reaches each page of docs/ from README.md, by links alone."""
    seen, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        left += [page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]

    assert set(ROOT.glob("docs/*.md")) <= seen
