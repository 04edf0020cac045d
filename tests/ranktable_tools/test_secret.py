"""The cluster secret beside the table."""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.secret import change_owner, check_owner, check_secret, ensure_secret
from security.secret import MAX_SECRET_BYTES, MIN_SECRET_BYTES, read_secret
from tests.ranktable_tools.other_user import as_an_owner_without_access, as_another_user
from wire.errors import ConfigError

GOOD = b"s" * MIN_SECRET_BYTES


def test_a_new_secret_is_private_and_random(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, first_is_new = ensure_secret(tmp_path)
    second, _ = ensure_secret(tmp_path / "b")

    assert first_is_new
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert len(bytes.fromhex(first.read_text())) == 32
    assert first.read_text() != second.read_text()


def test_an_existing_secret_is_kept(tmp_path: Path) -> None:
    _write(tmp_path)

    path, is_new = ensure_secret(tmp_path)

    assert (path.read_bytes(), is_new) == (GOOD, False)


def test_two_concurrent_creators_both_get_the_first_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[tuple[Path, bool]] = []
    draw = secrets.token_hex

    def while_another_is_faster(num_bytes: int) -> str:
        monkeypatch.setattr(secrets, "token_hex", draw)
        first.append(ensure_secret(tmp_path))
        kept.append(first[0][0].read_text())
        return draw(num_bytes)

    kept: list[str] = []
    monkeypatch.setattr(secrets, "token_hex", while_another_is_faster)

    path, is_new = ensure_secret(tmp_path)

    assert (first, is_new) == ([(path, True)], False)
    assert [path.read_text()] == kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_dangling_link_is_replaced_by_a_secret(tmp_path: Path) -> None:
    (tmp_path / "cluster_secret").symlink_to(tmp_path / "gone")

    path, is_new = ensure_secret(tmp_path)

    assert is_new
    assert not path.is_symlink()
    assert check_secret(tmp_path)


@pytest.mark.parametrize("size", [0, 5, MIN_SECRET_BYTES - 1, MAX_SECRET_BYTES + 1])
def test_a_secret_of_a_bad_size_is_refused_as_at_the_start(tmp_path: Path, size: int) -> None:
    _both_refuse(_write(tmp_path, b"s" * size))


@pytest.mark.parametrize("size", [MIN_SECRET_BYTES, MAX_SECRET_BYTES])
def test_a_secret_of_an_accepted_size_is_kept(tmp_path: Path, size: int) -> None:
    path = _write(tmp_path, b"s" * size + b"\n")

    assert check_secret(tmp_path)
    assert len(read_secret(path).value) == size


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o601])
def test_a_secret_readable_by_others_is_refused_as_at_the_start(tmp_path: Path, mode: int) -> None:
    _both_refuse(_write(tmp_path, mode=mode))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_secret_that_is_not_a_file_is_refused_as_at_the_start(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "cluster_secret"
    make(path)

    _both_refuse(path)


@pytest.mark.parametrize(("size", "mode"), [(5, 0o600), (MIN_SECRET_BYTES, 0o644)])
def test_a_link_is_judged_by_the_file_it_leads_to(tmp_path: Path, size: int, mode: int) -> None:
    (tmp_path / "far").mkdir()
    path = tmp_path / "cluster_secret"
    path.symlink_to(_write(tmp_path / "far", b"s" * size, mode))

    _both_refuse(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_foreign_secret_is_refused_unless_meant_for_its_owner(tmp_path: Path) -> None:
    path = _write(tmp_path)
    os.chown(path, 1000, -1)

    _both_refuse(path)
    assert check_secret(tmp_path, 1000)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RanktableError, match=r"file/cluster_secret: cannot be written: "):
        ensure_secret(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_secret_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    path = _write(tmp_path)
    owner = path.stat().st_uid

    with as_another_user(path):
        uid = os.geteuid()
        with pytest.raises(RanktableError) as caught:
            ensure_secret(tmp_path)

    assert str(caught.value) == (
        f"{path} cannot be read: Permission denied; it belongs to uid {owner}, and this process is uid {uid}: "
        "run as the file's owner, or move it away to get a new one"
    )
    assert path.read_bytes() == GOOD


def test_ones_own_unreadable_secret_is_reported_with_its_mode(tmp_path: Path) -> None:
    path = _write(tmp_path)

    with as_an_owner_without_access(path):
        uid = os.geteuid()
        with pytest.raises(RanktableError) as caught:
            ensure_secret(tmp_path)

    assert str(caught.value) == (
        f"{path} cannot be read: Permission denied; it belongs to uid {uid}, this process's user, and has mode 0000: "
        f"chmod 600 {path}"
    )


def test_a_file_is_given_to_a_user(tmp_path: Path) -> None:
    path, _ = ensure_secret(tmp_path)
    uid = 1000 if os.geteuid() == 0 else os.geteuid()

    change_owner(path, uid)

    assert path.stat().st_uid == uid
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("uid", [-1, 2**32 - 1, 2**40])
def test_an_impossible_uid_is_refused(tmp_path: Path, uid: int) -> None:
    with pytest.raises(RanktableError) as caught:
        check_owner(tmp_path, uid)

    assert str(caught.value) == f"--owner is {uid}, but must be a uid from 0 to 4294967294"


def test_a_uid_that_cannot_own_files_is_refused_leaving_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_allowed(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("ranktable_tools.secret.os.chown", not_allowed)

    with pytest.raises(RanktableError) as caught:
        check_owner(tmp_path / "new" / "folder", 1000)

    assert str(caught.value) == (
        f"--owner is 1000: files in {tmp_path} cannot be given to that uid: Operation not permitted; "
        f"this process is uid {os.geteuid()}: run this with CAP_CHOWN, or as uid 1000"
    )
    assert list(tmp_path.iterdir()) == []


def _write(folder: Path, secret: bytes = GOOD, mode: int = 0o600) -> Path:
    path = folder / "cluster_secret"
    path.write_bytes(secret)
    path.chmod(mode)
    return path


def _both_refuse(path: Path) -> None:
    with pytest.raises(ConfigError) as at_start:
        read_secret(path)
    with pytest.raises(RanktableError) as here:
        check_secret(path.parent)
    assert str(here.value).startswith(str(at_start.value).removeprefix("the cluster secret: "))
