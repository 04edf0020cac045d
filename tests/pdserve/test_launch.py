"""What a launch imports before its tables are checked, and the help of commands that accept its flags."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from flags.groups import GROUPS, GUIDE
from flags.options import EngineOptions
from pdserve import cli, launch
from scheduler.config import SchedulerOptions
from tests.pdserve.broken_starts import TABLES

_HEAVY = {
    "devices.table", "fastapi", "google.protobuf", "grpc", "numpy", "orjson", "pydantic", "torch",
    "transformers", "uvicorn", "yaml",
}  # fmt: skip
_CODE = f"""\
import sys
from tests.docs.broken_input import answer
from tests.pdserve.broken_starts import TABLES
print([answer(row).status for row in TABLES], sorted({_HEAVY!r} & set(sys.modules)))
"""


def test_bad_tables_are_refused_before_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=300, check=False)

    assert done.stderr == ""
    assert done.stdout == f"{[2] * len(TABLES)} []\n"


@pytest.mark.parametrize("command", ["start_servers.sh", "up", "serve", "run-batch"])
def test_help_has_the_guides_ten_flags_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "start_servers.sh":
        launch.main(["--help"])
    else:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])

    output = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", output.partition(f"{GUIDE}:\n")[2], re.MULTILINE)
    assert flags[:10] == ["--" + name.replace("_", "-") for name in GROUPS[GUIDE]]
    titles = re.findall(r"^([A-Za-z' ()]+):$", output, re.MULTILINE)
    assert titles.index(GUIDE) < titles.index("options")
    assert "more" not in titles


def test_every_group_names_existing_flags() -> None:
    there = {field.name for options in (EngineOptions, SchedulerOptions) for field in fields(options)}

    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(set(named) & there)
