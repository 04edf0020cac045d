"""`pd_ranktable_tools --mode gen|merge` behaves as in the guide."""

import json
import re
from pathlib import Path

import pytest

from ranktable_tools.guide import main

IP = "10.0.0.18"
GEN = ["--mode", "gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--ip", IP]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_guides_line_writes_exactly_the_guides_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GEN, "--api-server", "--save-dir", "./save_dir"]) == 0

    assert _files(tmp_path / "save_dir") == [
        "global_ranktable_10.0.0.18.json",
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}-INFO: ", line) for line in lines)
    assert [line.split("INFO: ")[1] for line in lines] == [
        "Save ./save_dir/global_ranktable_10.0.0.18.json",
        "Save ./save_dir/local_ranktable_10.0.0.18_45.json",
        "Save ./save_dir/local_ranktable_10.0.0.18_67.json",
        "Save ./save_dir/local_ranktable_10.0.0.18_host.json",
        "Generate global ranktable successful, host ip is 10.0.0.18",
        "Generate local ranktable successful.",
    ]


def test_the_guides_line_lists_workers_if_the_variable_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_WORKER", "vllm-ascend")

    assert main([*GEN, "--api-server"]) == 0
    table = json.loads((tmp_path / f"global_ranktable_{IP}.json").read_text())
    entries = [group["server_list"][0] for group in table["server_group_list"]]
    assert [entry.get("worker") for entry in entries] == [None, "vllm-ascend", "vllm-ascend"]

    monkeypatch.setenv("PDSERVE_WORKER", "sglang")
    assert main([*GEN, "--api-server"]) == 2
    assert 'PDSERVE_WORKER is "sglang": must be vllm or vllm-ascend' in capsys.readouterr().err


def test_only_api_server_adds_the_scheduler(tmp_path: Path) -> None:
    assert main(GEN) == 0

    document = json.loads((tmp_path / f"global_ranktable_{IP}.json").read_text())
    assert [group["group_id"] for group in document["server_group_list"]] == ["1", "2"]
    assert not list(tmp_path.glob("*_host.json"))


def test_the_guides_merge_line_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--mode", "gen", "--prefill-server-list", "0,1", "--api-server", "--ip", "10.0.0.1", "--save-dir", "a"])
    main(["--mode", "gen", "--decode-server-list", "0,1", "2,3", "--ip", "10.0.0.2", "--save-dir", "b"])
    files = ["a/global_ranktable_10.0.0.1.json", "b/global_ranktable_10.0.0.2.json"]
    capsys.readouterr()

    assert main(["--mode", "merge", "--global-ranktable-list", *files, "--save-dir", "c"]) == 0

    assert _files(tmp_path / "c") == ["global_ranktable_merge.json"]
    groups = json.loads((tmp_path / "c" / "global_ranktable_merge.json").read_text())["server_group_list"]
    assert [(group["group_id"], group["server_count"]) for group in groups] == [("0", "1"), ("1", "1"), ("2", "2")]
    assert "-INFO: Merge 2 global ranktable successful." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "bake"], "argument --mode: invalid choice: 'bake'"),
        (["--mode", "merge", "--api-server"], "--api-server belongs to --mode gen, not to --mode merge"),
        (["--mode", "merge", "--prefill-server-list", "1"], "--prefill-server-list belongs to --mode gen, not to"),
        ([*GEN, "--global-ranktable-list", "a"], "--global-ranktable-list belongs to --mode merge, not to --mode gen"),
        (["--mode", "merge"], "Ensure that there are two global ranktable for merge mode."),
        (["--mode", "merge", "--global-ranktable-list", "a"], "Ensure that there are two global ranktable for merge"),
        (["--mode", "merge", "--global-ranktable-list", "a", "b"], "a: cannot be read: No such file or directory"),
        ([*GEN, "--decode-server-list", "4"], "A device_id can be used only once in prefill server and decode server."),
        ([*GEN, "--decode-server-list", "4.5"], "Input format error."),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2

    error = capsys.readouterr().err
    assert f"-ERROR: {message}" in error
    assert error.count("\n") == 1
    assert _files(tmp_path) == []
