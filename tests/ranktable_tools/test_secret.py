"""The cluster secret beside the table."""

import os
import stat
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.secret import ensure_secret, give
from tests.ranktable_tools.stranger import as_a_stranger


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


def test_an_unreadable_secret_names_path_owner_and_uid(tmp_path: Path) -> None:
    (tmp_path / "cluster_secret").mkdir()

    with pytest.raises(RanktableError) as caught:
        ensure_secret(tmp_path)

    assert str(caught.value) == (
        f"{tmp_path}/cluster_secret: cannot be read: Is a directory; it belongs to uid {os.getuid()}, and this process "
        f"is uid {os.geteuid()}: run as that user, or as root with --owner UID"
    )


def test_a_secret_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cluster_secret"
    path.write_text("mine")

    with (
        as_a_stranger(tmp_path / "cluster_secret"),
        pytest.raises(RanktableError, match="cannot be read: Permission denied; it belongs"),
    ):
        ensure_secret(tmp_path)

    assert path.read_text() == "mine"


def test_a_file_is_given_to_a_user(tmp_path: Path) -> None:
    path, _ = ensure_secret(tmp_path)
    uid = 1000 if os.geteuid() == 0 else os.geteuid()

    give(path, uid)

    assert path.stat().st_uid == uid
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("uid", [-1, 2**40])
def test_a_uid_that_cannot_be_is_refused(tmp_path: Path, uid: int) -> None:
    path, _ = ensure_secret(tmp_path)

    with pytest.raises(RanktableError, match=f"{uid}"):
        give(path, uid)
