"""docs/doctor.md, in both languages, lists all checks of the doctor in the order of its output."""

import re
from pathlib import Path

import pytest

from ranktable_tools.doctor.checks import CHECKS
from ranktable_tools.doctor.versions import GUIDE_DRIVER, MIN_CANN, MIN_DRIVER, MIN_TORCH_NPU

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(params=["doctor.md", "doctor.zh-CN.md"])
def text(request: pytest.FixtureRequest) -> str:
    return (DOCS / str(request.param)).read_text()


def test_every_check_is_described(text: str) -> None:
    names = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)

    assert names[1:] == [check.name for check in CHECKS]


def test_the_versions_are_those_of_the_code(text: str) -> None:
    paragraph = next(part for part in text.split("\n\n") if "torch_npu 2." in part and part.startswith("**"))

    for version in (GUIDE_DRIVER, MIN_CANN, MIN_DRIVER, MIN_TORCH_NPU):
        assert version in paragraph
