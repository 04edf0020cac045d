"""docs/doctor.md lists the doctor's checks, all of them, in the order of the screen."""

import re
from pathlib import Path

from ranktable_tools.doctor.checks import CHECKS
from ranktable_tools.doctor.versions import GUIDE_DRIVER, MIN_CANN, MIN_DRIVER, MIN_TORCH_NPU

TEXT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def test_every_check_is_described() -> None:
    names = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", TEXT, re.MULTILINE)

    assert names == ["check", *(check.name for check in CHECKS)]


def test_the_versions_are_those_of_the_code() -> None:
    paragraph = next(part for part in TEXT.split("\n\n") if part.startswith("**Versions.**"))

    for version in (GUIDE_DRIVER, MIN_CANN, MIN_DRIVER, MIN_TORCH_NPU):
        assert version in paragraph
