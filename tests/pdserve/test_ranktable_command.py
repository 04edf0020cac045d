"""`ranktable COMMAND --config cluster.yaml`: flags over environment over file, one file for all commands."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdserve.flags.from_file import cluster_flags
from pdserve.instance_flags import parse_instance_flags
from pdserve.ranktable_command import main, with_file
from ranktable_tools.cli import command_parsers

ROOT = Path(__file__).resolve().parents[2]
IP = "10.0.0.18"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "USE_OPENAI"):
        monkeypatch.setenv(name, "")  # so that what the command sets is restored


def _config(text: str) -> str:
    Path("cluster.yaml").write_text(text)
    return "--config=cluster.yaml"


def _devices() -> dict[str, list[list[str]]]:
    document = json.loads(Path("tables", f"global_ranktable_{IP}.json").read_text())
    return {
        group["group_id"]: [
            [device["device_id"] for device in server.get("device", [])] for server in group["server_list"]
        ]
        for group in document["server_group_list"]
    }


GEN = f"""\
model: /models/Qwen3-0.6B        # for those who serve
max-num-seqs: 4
enforce-eager: true
prefill-server-list: ["4,5", "6,7"]
decode-server-list: 0,1
ports: 8088,8089,8090
api-server: yes
ip: {IP}
device-type: cpu
save-dir: tables
"""


def test_gen_reads_all_of_its_flags_from_the_clusters_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gen", _config(GEN)]) == 0

    assert _devices() == {"0": [[]], "1": [["4", "5"], ["6", "7"]], "2": [["0", "1"]]}
    assert "NODE_PORTS=8088,8089,8090 " in capsys.readouterr().out


def test_typed_flags_replace_the_files_lists_and_switches() -> None:
    config = _config(GEN)

    assert main(["gen", "--prefill-server-list", "2", "3", config, "--no-api-server"]) == 0

    assert _devices() == {"1": [["2"], ["3"]], "2": [["0", "1"]]}


def test_a_list_of_files_stays_a_list_before_typed_words() -> None:
    config = _config("global-ranktable-list: [a.json, 'b c.json']\nfor: 3\nstrict: true\nsave-dir: whole\n")

    assert with_file(["merge", config], {})[0] == [
        "merge", "--global-ranktable-list", "a.json", "b c.json", "--save-dir", "whole",
    ]  # fmt: skip
    assert with_file(["lint", config, "a.json", "--", "-b.json"], {})[0] == [
        "lint", "a.json", "--strict", "--", "-b.json",
    ]  # fmt: skip


@pytest.mark.parametrize("command", command_parsers())
def test_every_command_takes_a_file_and_refuses_unknown_keys(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, _config("ip: 10.0.0.1\n# a comment\nprefil-server-list: 4\n")]) == 2

    reported = capsys.readouterr().err
    assert (
        reported == "ranktable: cluster.yaml:3: unknown key 'prefil-server-list': did you mean prefill-server-list?\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device-type: tpu", ":1: device-type: 'tpu' is not one of cpu, cuda, npu"),
        ("ports: [1, 2]", ":1: ports takes one value, not a list"),
        ("api-server: maybe", ":1: api-server must be true or false, not 'maybe'"),
        ("ip: &a 10.0.0.1\nsave-dir: *a", ":2: *a is an alias: write the value out"),
    ],
)
def test_a_bad_value_is_one_line_with_its_place_and_status_2(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gen", _config(text)]) == 2

    reported = capsys.readouterr().err
    assert reported.startswith("ranktable: cluster.yaml:")
    assert words in reported
    assert reported.count("\n") == 1


def test_doctor_checks_the_table_that_start_servers_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gen", _config(GEN)])
    config = _config(f"global-rank-table: tables/global_ranktable_{IP}.json\nmib: 0\nformat: json\ntimeout: 20\n")
    capsys.readouterr()

    main(["doctor", config])

    findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["tables"]["words"].startswith("2 prefill, 1 decode")


def test_the_environment_overrides_the_file() -> None:
    config = _config("global-rank-table: file.json\nnode-ports: 1,2\n")

    assert with_file(["doctor", config], {"NODE_PORTS": "3,4"})[1] == {"GLOBAL_RANK_TABLE_FILE_PATH": "file.json"}


def test_without_a_file_and_for_help_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gen", "--ip", "10.**.**.18", "--api-server"]) == 2
    assert "masked address" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help", _config("ip: x")])
    assert "ranktable gen --config cluster.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("command", command_parsers())
def test_the_help_of_every_command_names_the_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    assert "--config FILE" in capsys.readouterr().out


def test_one_file_also_works_for_the_processes() -> None:
    config = _config(GEN)

    typed = parse_instance_flags([config], {})

    assert (typed.options.model, typed.options.max_num_seqs) == ("/models/Qwen3-0.6B", 4)


def test_every_table_flag_is_a_key_that_others_ignore() -> None:
    flags = {flag for parser in command_parsers().values() for flag in parser._option_string_actions}

    assert {flag for flag in flags if flag.startswith("--") and not flag.startswith("--no-")} - cluster_flags() == {
        "--help"
    }


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["ranktable"].partition(":")

    assert getattr(importlib.import_module(module), name) is main


def test_without_a_file_no_pdserve_module_is_loaded() -> None:
    code = "import sys, pdserve.ranktable_command as c; c.main(['lint', 'gone.json']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=True)

    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {"yaml", "scheduler", "wire", "grpc", "http.client"} & loaded
