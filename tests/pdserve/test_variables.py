"""Names of variables: ours, misspelled ones, Kubernetes', and others."""

import re
import subprocess
from pathlib import Path

import pytest

from pdserve.guarded import guarded
from pdserve.variables import _OTHERS, PREFIX, VARIABLES

CLONE = Path(__file__).parents[2]
_TEXTS = {"PDSERVE_CONTINUES_FROM_HERE", "PDSERVE_API_KYE"}  # a mark in chat templates, and a typo that docs show


@pytest.fixture(autouse=True)
def _none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *_OTHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PDSERVE_API_KYE", "PDSERVE_API_KEY"),
        ("PDSERVE_APIKEY", "PDSERVE_API_KEY"),
        ("PDSERVE_API_KEY_FILE", "PDSERVE_API_KEY"),
        ("pdserve_api_key", "PDSERVE_API_KEY"),
        ("PDSERVE_SECRET", "PDSERVE_SECRET_FILE"),
        ("PDSERVE_RUNDIR", "PDSERVE_RUN_DIR"),
    ],
)
def test_a_misspelled_name_is_refused_with_ours(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "x")

    assert guarded("pdserve up", lambda: 0) == 2
    assert capsys.readouterr().err == f"pdserve up: there is no variable {name}: did you mean {meant}?\n"


def test_unknown_variables_are_one_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PDSERVE_COLOUR", "red")
    monkeypatch.setenv("PDSERVE_MOOD", "blue")

    assert guarded("pdserve up", lambda: 0) == 0
    assert capsys.readouterr().err == (
        "warning: nothing reads PDSERVE_COLOUR, PDSERVE_MOOD: docs/flags.md lists the variables\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        *VARIABLES, "PDSERVE_SERVICE_HOST", "PDSERVE_SERVICE_PORT", "PDSERVE_SERVICE_PORT_HTTP", "PDSERVE_PORT",
        "PDSERVE_PORT_9000_TCP_ADDR", "PDSERVE_SCHEDULER_SERVICE_HOST", "PDSERVE_API_KEY_PORT_9000_TCP",
        "PDSERVE_TEST_ALL",
    ],
)  # fmt: skip
def test_our_variables_and_those_of_kubernetes_are_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "x")

    assert guarded("pdserve up", lambda: 0) == 0
    assert capsys.readouterr().err == ""


def test_every_variable_of_the_product_is_in_the_table() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=CLONE, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.splitlines() if name.endswith((".py", ".sh", ".c", ".yaml", ".tpl"))]
    texts = [(CLONE / name).read_text() for name in files if not name.startswith("tests/")]
    found = {name for text in texts for name in re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", text)}

    known = {*VARIABLES, *_OTHERS, *_TEXTS}
    assert {name for name in found - known if not name.startswith("PDSERVE_TEST")} == set()


def test_the_page_of_flags_lists_every_variable() -> None:
    page = (CLONE / "docs/flags.md").read_text()

    assert [name for name in VARIABLES if f"| `{name}` |" not in page] == []
