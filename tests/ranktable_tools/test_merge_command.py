"""`ranktable merge`, from its arguments to files, their owner, output and exit status."""

import errno
import os
from pathlib import Path

import pytest

from ranktable_tools.cli import main

IP = "10.0.0.18"
GEN = ["gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--ip", IP, "--device-type", "cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _two_hosts() -> list[str]:
    main(["gen", "--prefill-server-list", "0", "--api-server", "--ip", "10.0.0.1", "--device-type", "cpu"])
    main(["gen", "--decode-server-list", "0", "--ip", "10.0.0.2", "--device-type", "cpu"])
    return ["global_ranktable_10.0.0.1.json", "global_ranktable_10.0.0.2.json"]


def test_two_hosts_merge_into_a_cluster_with_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gen", "--prefill-server-list", "0,1", "--api-server", "--ip", "10.0.0.1", "--device-type", "cpu"])
    main(["gen", "--decode-server-list", "0,1", "--ip", "10.0.0.2", "--device-type", "cpu"])
    files = ["global_ranktable_10.0.0.1.json", "global_ranktable_10.0.0.2.json"]

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole"]) == 0

    assert _files(tmp_path / "whole") == ["cluster_secret", "global_ranktable_merge.json"]
    assert "Merge 2 global ranktable successful." in capsys.readouterr().out
    assert main(["lint", "whole/global_ranktable_merge.json", *map(str, tmp_path.glob("local*"))]) == 0


def test_merge_notes_instances_of_unequal_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gen", "--prefill-server-list", "0,1", "--api-server", "--ip", "10.0.0.1", "--device-type", "cpu"])
    main(["gen", "--decode-server-list", "0", "--ip", "10.0.0.2", "--device-type", "cpu"])
    files = ["global_ranktable_10.0.0.1.json", "global_ranktable_10.0.0.2.json"]
    capsys.readouterr()

    assert main(["merge", "--global-ranktable-list", *files]) == 0

    note = "Note: the instances differ in tensor-parallel-size, prefill first: 2,1"
    assert note in capsys.readouterr().out.splitlines()


def test_merge_gives_table_and_secret_to_their_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uid = 1000 if os.geteuid() == 0 else os.geteuid()
    files = _two_hosts()

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole", "--owner", str(uid)]) == 0

    assert {path.name: path.stat().st_uid for path in (tmp_path / "whole").iterdir()} == {
        "cluster_secret": uid,
        "global_ranktable_merge.json": uid,
    }
    out = capsys.readouterr().out
    assert f"Both belong to uid {uid}." in out
    assert "Next: copy whole/global_ranktable_merge.json and whole/cluster_secret to every host, side by side" in out


def test_merge_writes_nothing_if_a_secret_is_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole" / "cluster_secret").mkdir(parents=True)
    files = _two_hosts()

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole"]) == 2

    assert _files(tmp_path / "whole") == ["cluster_secret"]
    error = capsys.readouterr().err
    assert "whole/cluster_secret cannot be read: Is a directory; move it away to get a new one" in error


@pytest.mark.parametrize("uid", ["-1", "99999999999"])
def test_merge_writes_nothing_for_an_impossible_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uid: str
) -> None:
    files = _two_hosts()

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole", f"--owner={uid}"]) == 2

    assert not (tmp_path / "whole").exists()
    assert capsys.readouterr().err == f"ranktable: --owner is {uid}, but must be a uid from 0 to 4294967294\n"


def test_merge_writes_nothing_if_the_owner_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_allowed(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    files = _two_hosts()
    monkeypatch.setattr("ranktable_tools.secret.os.chown", not_allowed)

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole", "--owner", "1000"]) == 2

    assert not (tmp_path / "whole").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_second_merge_keeps_the_secret_that_the_first_gave_away(tmp_path: Path) -> None:
    files = _two_hosts()
    merge = ["merge", "--global-ranktable-list", *files, "--save-dir", "whole"]
    assert main([*merge, "--owner", "1000"]) == 0
    secret = (tmp_path / "whole" / "cluster_secret").read_text()

    assert main([*merge, "--owner", "1000"]) == 0
    assert main(merge) == 2

    assert (tmp_path / "whole" / "cluster_secret").read_text() == secret


def test_merging_two_schedulers_fails_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(GEN)
    main([*GEN, "--ip", "10.0.0.2"])
    files = [f"global_ranktable_{IP}.json", "global_ranktable_10.0.0.2.json"]
    capsys.readouterr()

    assert main(["merge", "--global-ranktable-list", *files, "--save-dir", "whole"]) == 2

    message = capsys.readouterr().err
    assert f"{files[0]} and {files[1]} have one each" in message
    assert "--no-api-server" in message
    assert not (tmp_path / "whole").exists()
