"""`ranktable lint`, from its arguments to output and exit status."""

import json
from pathlib import Path

import pytest

from ranktable_tools.cli import main

IP = "10.0.0.18"
GEN = ["gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--ip", IP, "--device-type", "cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_lint_as_json_has_path_value_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GEN, "--decode-server-list", "8"])
    capsys.readouterr()
    name = f"global_ranktable_{IP}.json"
    Path(name).write_text(Path(name).read_text().replace('"device_id": "4"', '"device_id": 4'))

    assert main(["lint", name, "--format", "json"]) == 2

    assert json.loads(capsys.readouterr().out) == {
        "files": [name],
        "findings": [
            {
                "file": name,
                "severity": "error",
                "code": "wrong-type",
                "path": "server_group_list[1].server_list[0].device[0].device_id",
                "value": 4,
                "message": "server_group_list[1].server_list[0].device[0].device_id is 4",
                "instead": "must be a string",
            }
        ],
    }


def test_a_non_object_is_reported_once_and_long_values_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    main(GEN)
    capsys.readouterr()
    document = json.loads(Path(f"global_ranktable_{IP}.json").read_text())
    document["server_group_list"][1]["server_list"][0] = ["x" * 2000]
    Path("t.json").write_text(json.dumps(document))

    assert main(["lint", "t.json", "--format", "json"]) == 2

    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["path"] == "server_group_list[1].server_list[0]"
    assert finding["value"] == '["' + "x" * 58 + "..."
    assert finding["instead"] == "must be an object"


def test_a_note_is_printed_and_does_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GEN[:-4], "--ip", IP, "--device-type", "cpu", "--decode-server-list", "8"])
    capsys.readouterr()

    assert main(["lint", f"global_ranktable_{IP}.json"]) == 0
    note, last = capsys.readouterr().out.splitlines()
    assert note.startswith(f"global_ranktable_{IP}.json: note: server_group_list[2].server_list[1] has 1 device, and ")
    assert last == "1 checked, nothing wrong"
    assert main(["lint", f"global_ranktable_{IP}.json", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["severity"] == "note"


def test_thousands_of_mistakes_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    servers = [{"server_id": " ", "server_ip": "10.0.0.1"} for _ in range(1000)]
    groups = [{"group_id": "1", "server_count": "1000", "server_list": servers}]
    Path("t.json").write_text(json.dumps({"version": "1.0", "status": "completed", "server_group_list": groups}))

    assert main(["lint", "t.json"]) == 2

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 201
    assert lines[-1] == "and 801 more (--format json lists all)"


def test_lint_lists_every_problem_with_file_place_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(GEN)
    path = tmp_path / f"global_ranktable_{IP}.json"
    path.write_text(path.read_text().replace('"rank_id": "1"', '"rank_id": "3"'))
    (tmp_path / "not.json").write_text("{")
    capsys.readouterr()

    assert main(["lint", path.name, "not.json", "gone.json"]) == 2

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{path.name}: server_group_list[1].server_list[0].device has the rank_ids ")
    assert sum('must be ["0", "1"]: from 0, without a gap' in line for line in lines) == 2
    assert lines[2].startswith("not.json: not JSON: line 1 column 2: ")
    assert lines[3] == "gone.json: cannot be read: No such file or directory [unreadable]"


def test_lint_compares_local_tables_with_the_global_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(GEN)
    local = tmp_path / f"local_ranktable_{IP}_45.json"
    local.write_text(local.read_text().replace('"device_id": "5"', '"device_id": "8"'))
    files = [f"global_ranktable_{IP}.json", local.name]
    capsys.readouterr()

    assert main(["lint", *files]) == 2
    assert capsys.readouterr().out == (
        f"{local.name}: is not in the global table; the nearest entry is prefill-0 "
        '(server_group_list[1].server_list[0]): the device_id list is ["4", "8"] here and ["4", "5"] there '
        f"({files[0]}) [not-in-global]\n"
    )


def test_lint_reports_a_partial_table(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GEN, "--no-api-server"])
    capsys.readouterr()

    assert main(["lint", f"global_ranktable_{IP}.json"]) == 2
    assert (
        'has 2 groups; must have 3: 0 (scheduler), 1 (prefill) and 2 (decode); here: ["1", "2"]'
        in capsys.readouterr().out
    )
    assert main(["lint", f"global_ranktable_{IP}.json", "--part"]) == 0
