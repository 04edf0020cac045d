"""Each page of PAGES has a Chinese version: the same flags, files, variables and figures."""

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["deploy", "images", "kubernetes", "launch", "npu", "ray", "route"]
_CODE = re.compile(r"`([^`]+)`")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```", re.MULTILINE)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)


def _text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _codes(text: str) -> set[str]:
    return {" ".join(code.split()) for code in _CODE.findall(_BLOCK.sub("", text))}


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


@pytest.mark.parametrize("page", PAGES)
def test_both_pages_link_to_each_other(page: str) -> None:
    assert f"[中文]({page}.zh-CN.md)" in _text(f"{page}.md")
    assert f"[English]({page}.md)" in _text(f"{page}.zh-CN.md")


@pytest.mark.parametrize("page", PAGES)
def test_both_pages_have_the_same_flags_headings_rows_and_examples(page: str) -> None:
    english, chinese = _text(f"{page}.md"), _text(f"{page}.zh-CN.md")

    assert _flags(chinese) == _flags(english)
    assert len(_HEADING.findall(chinese)) == len(_HEADING.findall(english))
    assert len(_FENCE.findall(chinese)) == len(_FENCE.findall(english))
    assert Counter(line.count("|") for line in chinese.splitlines() if line.startswith("|")) == Counter(
        line.count("|") for line in english.splitlines() if line.startswith("|")
    )


@pytest.mark.parametrize("page", PAGES)
def test_code_spans_are_the_same_in_both_languages(page: str) -> None:
    assert _codes(_text(f"{page}.zh-CN.md")) == _codes(_text(f"{page}.md"))
