"""A file appears completely or not at all, and never replaces anything but a regular file."""

import os
import stat
from pathlib import Path

import pytest

from batch.whole_file import WholeFile, check_folder, check_place, temporary_path
from wire.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path at which the file is to appear."""
    return tmp_path / "out.jsonl"


def _write(path: Path, content: bytes = b"new\n") -> None:
    with WholeFile(path) as file:
        file.write(content)
        file.flush()
        file.publish()


def test_a_file_appears_at_once_and_leaves_nothing_beside(path: Path) -> None:
    with WholeFile(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.publish()

    assert path.read_bytes() == b"half"
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_replacement_leaves_only_the_old_file(path: Path) -> None:
    path.write_bytes(b"old")

    with WholeFile(path) as file:
        file.write(b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_a_killed_writers_temporary_file_is_replaced(path: Path) -> None:
    temporary_path(path).write_bytes(b"left by a killed writer, and longer")

    _write(path)

    assert path.read_bytes() == b"new\n"
    assert os.listdir(path.parent) == [path.name]


def test_a_planted_link_is_not_followed(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    temporary_path(path).symlink_to(other)

    _write(path)

    assert other.read_bytes() == b"other"
    assert not path.is_symlink()


def test_two_writers_of_one_place_do_not_mix(path: Path) -> None:
    with WholeFile(path) as first, WholeFile(path) as second:
        first.write(b"first")
        second.write(b"second")
        first.flush()
        second.flush()
        with pytest.raises(OSError, match="another run is writing the same file"):
            first.publish()
        second.publish()

    assert path.read_bytes() == b"second"


def test_a_new_file_has_the_umasks_mode_a_replaced_one_keeps_its_own(path: Path) -> None:
    before = os.umask(0o027)
    try:
        _write(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

        path.chmod(0o600)
        _write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_places_where_a_file_can_appear(path: Path) -> None:
    check_place(path, "the output")
    path.write_bytes(b"old")
    check_place(path, "the output")
    check_folder(path, "the output")


def test_impossible_places_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    os.mkfifo(tmp_path / "pipe")

    for place, words in (
        (tmp_path / "link", "is a symbolic link: name the file itself"),
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "pipe", "is not a regular file: name a file"),
        (Path("/dev/full"), "is not a regular file: name a file"),
        (tmp_path / "pipe" / "below", "Not a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_place(place, "the output")
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        check_folder(tmp_path / "nowhere" / "out", "the output")


def test_a_read_only_place_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere

    with pytest.raises(ConfigError, match=r"the output .* is read-only"):
        check_place(path, "the output")
    with pytest.raises(ConfigError, match=r"the folder .* is read-only"):
        check_folder(path, "the output")
