"""A received file appears at its path only when it is complete."""

import errno
import os
from pathlib import Path

import pytest

from remote_files.received_file import ReceivedFile
from wire.errors import ConfigError


def test_a_kept_file_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"old")
    with ReceivedFile(path) as file:
        file.write(b"ne")
        file.write(b"w")
        assert path.read_bytes() == b"old"
        file.keep()

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_kept_leaves_nothing(tmp_path: Path) -> None:
    with ReceivedFile(tmp_path / "in") as file:
        file.write(b"half")

    assert list(tmp_path.iterdir()) == []


def test_a_part_left_by_a_killed_run_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "in.part").write_bytes(b"an older and longer part")
    with ReceivedFile(tmp_path / "in") as file:
        file.write(b"new")
        file.keep()

    assert (tmp_path / "in").read_bytes() == b"new"


def test_a_link_in_place_of_the_part_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "in.part").symlink_to(victim)

    with (
        pytest.raises(ConfigError, match=r"in\.part: Too many levels of symbolic links"),
        ReceivedFile(tmp_path / "in"),
    ):
        pass

    assert victim.read_bytes() == b"mine"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"none/in\.part: No such file or directory"),
        ReceivedFile(tmp_path / "none" / "in"),
    ):
        pass


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)

    with pytest.raises(ConfigError, match=r"in\.part: No space left on device"), ReceivedFile(tmp_path / "in") as file:
        file.write(b"x")

    assert list(tmp_path.iterdir()) == []
