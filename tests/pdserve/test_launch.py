"""What a launch imports before its tables are known to be right."""

import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=False)

    assert done.stderr == ""
    assert done.stdout == f"{[2] * len(TABLES)} []\n"
