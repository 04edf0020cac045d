"""The cluster secret beside the table."""

import stat
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.secret import ensure_secret


def test_a_new_secret_is_private_and_random(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, first_is_new = ensure_secret(tmp_path)
    second, _ = ensure_secret(tmp_path / "b")

    assert first_is_new
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert len(bytes.fromhex(first.read_text())) == 32
    assert first.read_text() != second.read_text()


def test_an_existing_secret_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cluster_secret").write_text("mine")

    path, is_new = ensure_secret(tmp_path)

    assert (path.read_text(), is_new) == ("mine", False)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RanktableError, match=r"file/cluster_secret: cannot be written: "):
        ensure_secret(tmp_path / "file")
