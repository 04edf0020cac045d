"""`ranktable gen --owner UID`: the files of a host belong to the user in its containers, as those of merge do."""

import errno
import os
from pathlib import Path

import pytest

from ranktable_tools.cli import main

GEN = ["gen", "--prefill-server-list", "4,5", "--ip", "10.0.0.18", "--device-type", "cpu", "--save-dir", "out"]
WHOLE = [*GEN, "--decode-server-list", "6,7"]
UID = 1000 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _owners() -> dict[str, int]:
    return {path.name: path.stat().st_uid for path in Path("out").iterdir()}


def test_gen_gives_every_file_to_the_owner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WHOLE, "--owner", str(UID)]) == 0

    names = ("global_ranktable_10.0.0.18.json", "cluster_secret",
             *(f"local_ranktable_10.0.0.18_{own}.json" for own in ("45", "67", "host")))  # fmt: skip
    assert _owners() == dict.fromkeys(names, UID)
    assert f"All 5 files belong to uid {UID}." in capsys.readouterr().out


def test_a_partial_table_is_owned_too_and_has_no_secret() -> None:
    assert main([*GEN, f"--owner={UID}"]) == 0

    assert _owners() == dict.fromkeys(
        ("global_ranktable_10.0.0.18.json", "local_ranktable_10.0.0.18_45.json"), UID
    )  # fmt: skip


@pytest.mark.parametrize("uid", ["-1", "99999999999"])
def test_gen_writes_nothing_for_an_impossible_owner(uid: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WHOLE, f"--owner={uid}"]) == 2

    assert capsys.readouterr().err == f"ranktable: --owner is {uid}, but must be a uid from 0 to 4294967294\n"
    assert not Path("out").exists()


def test_gen_writes_nothing_if_the_owner_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_allowed(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("ranktable_tools.secret.os.chown", not_allowed)

    assert main([*WHOLE, "--owner", "1000"]) == 2

    assert "--owner is 1000: files in " in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_gen_keeps_the_owners_secret_and_names_the_flag_to_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([*WHOLE, "--owner=1000"])
    secret = Path("out/cluster_secret").read_text()
    capsys.readouterr()

    assert main(WHOLE) == 2
    assert "belongs to uid 1000, but this process is uid 0: run as the file's owner, or as root with --owner UID" in (
        capsys.readouterr().err
    )
    assert main([*WHOLE, "--owner=1000"]) == 0

    assert Path("out/cluster_secret").read_text() == secret
    assert set(_owners().values()) == {1000}
