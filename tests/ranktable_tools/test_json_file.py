"""Strict JSON is read, complete private files are written."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import read_json, write_private, write_private_first
from tests.ranktable_tools.other_user import as_an_owner_without_access, as_another_user

Save = Callable[[str, object], str]


def _message(path: str) -> str:
    with pytest.raises(RanktableError) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named_with_the_reason(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")

    assert _message(path) == f"{path}: cannot be read: No such file or directory"


def test_a_folder_is_named_with_the_reason(tmp_path: Path) -> None:
    assert _message(str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


def test_invalid_json_is_reported_with_line_and_column(save: Save) -> None:
    path = save("t.json", '{\n  "version": }')

    assert _message(path) == f"{path}: not JSON: line 2 column 14: Expecting value"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "Expecting value"), ('{"a": NaN}', "NaN is not a JSON number"), ("[" * 100_000, "more than 32 deep")],
)
def test_unusual_texts_are_refused(save: Save, text: str, reason: str) -> None:
    assert reason in _message(save("t.json", text))


@pytest.mark.parametrize(("number", "digits"), [("1" * 5_000, 5_000), ("-" + "1" * 641, 641)])
def test_a_number_too_long_for_python_is_refused_with_our_message(save: Save, number: str, digits: int) -> None:
    path = save("t.json", f'{{"version": {number}}}')

    assert _message(path) == f"{path}: a number of {digits} digits; the limit is 640"


def test_the_longest_readable_number_is_read(save: Save) -> None:
    assert read_json(save("t.json", "-" + "1" * 640)) == -int("1" * 640)


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    os.mkfifo(path)

    assert _message(str(path)) == f"{path}: not a regular file; name a file, or /dev/stdin for a pipe"


def test_a_pipe_of_this_process_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"a": 1}')
    os.close(writer)
    try:
        assert read_json(f"/dev/fd/{reader}") == {"a": 1}
    finally:
        os.close(reader)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"a": "\xff"}')

    assert _message(str(path)) == f"{path}: not JSON: byte 7 is not UTF-8"


def test_a_duplicate_key_is_named_with_its_place(save: Save) -> None:
    path = save("t.json", '{"list": [{}, {"inner": {"version": "1", "version": "2"}}]}')

    assert _message(path) == f'{path}: list[1].inner.version: duplicate key "version"; keep one of them'


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')

    assert read_json(str(path)) == {"a": 1}


def test_a_written_file_is_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"

    write_private(path, "text")

    assert path.read_text() == "text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_writing_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    link = tmp_path / "t.json"
    link.symlink_to(target)

    write_private(link, "new")

    assert target.read_text() == "kept"
    assert link.read_text() == "new"
    assert not link.is_symlink()


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.mkdir()

    with pytest.raises(RanktableError, match=r"t\.json: cannot be written: "):
        write_private(path, "text")

    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_while_it_writes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)

    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "t.json", "text")

    assert list(tmp_path.iterdir()) == []


def test_the_file_written_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t"

    written = [write_private_first(path, text) for text in ("first", "second")]

    assert written == [True, False]
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("first", 0o600)
    assert list(path.parent.iterdir()) == [path]


def test_without_hard_links_it_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none_here)

    assert write_private_first(tmp_path / "t", "text")

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t", "text")]


def test_a_disk_that_refuses_links_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)

    with pytest.raises(RanktableError, match=r"/t: cannot be written: No space left on device"):
        write_private_first(tmp_path / "t", "text")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_table_of_another_user_names_owner_and_uid(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    owner = path.stat().st_uid

    with as_another_user(path):
        message, uid = _message(str(path)), os.geteuid()

    assert message == (
        f"{path}: cannot be read: Permission denied; it belongs to uid {owner}, and this process is uid {uid}"
    )


def test_ones_own_unreadable_table_is_reported_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")

    with as_an_owner_without_access(path):
        message, uid = _message(str(path)), os.geteuid()

    words = f"it belongs to uid {uid}, this process's user, and has mode 0000"
    assert message == f"{path}: cannot be read: Permission denied; {words}"
