"""vLLM's own tests of its server, run against ours: each passes, or fails for a reason that is on record."""

import os
from pathlib import Path

import pytest

from pdserve.run_folder import default_cache_dir
from tests.vllm_server_tests.files import FILES
from tests.vllm_server_tests.files_left_out import LEFT_OUT
from tests.vllm_server_tests.judged import differences
from tests.vllm_server_tests.run_files import run_file
from tests.vllm_server_tests.sdist import server_tests

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3000)]


@pytest.fixture(scope="session")
def vllm_tests() -> Path:
    """The folder of vLLM's tests; a failure where it cannot be downloaded."""
    return server_tests(default_cache_dir(os.environ))


def test_each_file_is_taken_or_left_out_for_a_reason(vllm_tests: Path) -> None:
    folder = vllm_tests / "tests" / "entrypoints"
    files = {str(path.relative_to(folder)) for path in folder.rglob("test_*.py")}

    assert files == {*FILES, *(file for found in LEFT_OUT.values() for file in found)}


@pytest.mark.parametrize(("file", "way"), [(file, way) for file, row in FILES.items() for way in row.ways])
def test_a_file_does_what_is_on_record(vllm_tests: Path, file: str, way: str) -> None:
    row = FILES[file]

    found = run_file(vllm_tests, file, way, row.models, tuple(row.left_out))

    assert "\n".join(differences(row, found)) == ""
