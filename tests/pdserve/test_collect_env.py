"""`pdserve collect-env` has what a bug report needs, and no secret, key, token or whole environment."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import main
from pdserve.collect_env import report
from pdserve.env_facts import VARIABLES, machine_facts
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.doctor.case import DoctorInput, read_tables
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.secret import ensure_secret
from tests.ranktable_tools import recorded
from tests.ranktable_tools.bench import Bench

IP = "127.0.0.1"
SECRETS = {
    "HF_TOKEN": "hf_abcdefghijkl",
    "OPENAI_API_KEY": "sk-0123456789",
    "PDSERVE_API_KEY": "pd-0123456789",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "http_proxy": "http://user:pa55word@proxy.example:3128",
}
OTHERS = {"MY_COMPANY_PROJECT": "moonshot", "EDITOR": "emacs-of-somebody"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables of 1P1D with their secret."""
    gen(GenArguments(["4,5"], ["6,7"], True, str(tmp_path / "t"), IP, "8088,8089", "cpu"), lambda line: None)
    ensure_secret(tmp_path / "t")
    return tmp_path / "t"


def _case(bench: Bench, folder: Path, **environ: str) -> DoctorInput:
    bench.tool("python", {}, other=f"pdserve links: somebody said {SECRETS['HF_TOKEN']}\n")
    named = {"GLOBAL_RANK_TABLE_FILE_PATH": str(folder / f"global_ranktable_{IP}.json")}
    machine = bench.machine({**named, "PDSERVE_PYTHON": str(bench.tools / "python"), **environ})
    return DoctorInput(machine, read_tables([], machine), "http://127.0.0.1:1", connect_s=2.0)


@pytest.mark.parametrize("as_json", [False, True])
def test_no_secret_no_key_no_token_and_no_other_variable_is_printed(
    tmp_path: Path, folder: Path, as_json: bool
) -> None:
    secret = (folder / "cluster_secret").read_text().strip()
    leaky = {"no_proxy": f"localhost,{secret}", "NODE_PORTS": SECRETS["OPENAI_API_KEY"]}

    text = report(_case(Bench(tmp_path), folder, **SECRETS, **OTHERS, **leaky), 20, as_json=as_json)

    for value in (secret, "pa55word", *list(SECRETS.values())[:-1], *OTHERS, *OTHERS.values()):
        assert value not in text
    assert "proxy.example:3128" in text
    assert "(hidden)" in text


def test_a_secret_in_another_spelling_of_json_is_hidden_too(tmp_path: Path, folder: Path) -> None:
    odd = 'quote"and\\slash'

    text = report(_case(Bench(tmp_path), folder, API_KEY=odd, no_proxy=odd), 20, as_json=True)

    assert "slash" not in text


def test_the_report_has_versions_hardware_tables_and_findings(tmp_path: Path, folder: Path) -> None:
    bench = Bench(tmp_path)
    bench.file("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Kunpeng 920\nflags\t\t: fpu avx2 amx_bf16\n")
    bench.file("/proc/meminfo", "MemTotal:       1056 kB\nMemAvailable:    528 kB\n")
    bench.file("/etc/os-release", 'NAME=x\nPRETTY_NAME="EulerOS 2.0 (SP10)"\n')

    reported: dict[str, Any] = json.loads(report(_case(bench, folder, OMP_NUM_THREADS="4"), 20, as_json=True))

    assert reported["software"]["pdserve"]
    assert reported["software"]["system"].startswith("EulerOS 2.0 (SP10), Linux ")
    assert (reported["hardware"]["cpu"], reported["hardware"]["cpu flags"]) == ("Kunpeng 920", "avx2 amx_bf16")
    assert reported["hardware"]["memory"] == "1056 kB, 528 kB available"
    assert reported["packages"]["grpcio"]
    assert reported["environment"]["OMP_NUM_THREADS"] == "4"
    assert reported["tables"] == {
        "scheduler": IP,
        "prefill-0": f"{IP} devices 4,5 port 8088",
        "decode-0": f"{IP} devices 6,7 port 8089",
    }
    assert {"ports", "versions", "links"} <= {check["name"] for check in reported["doctor"]}


def test_npu_versions_are_included(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "davinci0")
    bench.tool("npu-smi", {"info": recorded.INFO_A2, "info -t board -i 0": recorded.BOARD})

    software = machine_facts(bench.machine())["software"]

    assert (software["driver"], software["firmware"], software["CANN"]) == ("23.0.5", "7.1.0.7.220", "-")


def test_only_variables_of_a_closed_list_are_shown() -> None:
    environ = dict.fromkeys((*VARIABLES, "SECOND_HOME", "HOME"), "x")

    assert set(machine_facts(Machine(environ))["environment"]) == set(VARIABLES)


def test_the_command_prints_sections_and_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)

    assert main(["collect-env", "--device-type", "cpu"]) == 0

    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        "[software]", "[hardware]", "[limits]", "[packages]", "[environment]", "[tables]", "[doctor]",
    ]  # fmt: skip


def test_the_cluster_of_pdserve_up_is_the_default(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    own = ProcessRecord("prefill-0", "prefill", os.getpid(), start_time(os.getpid()) or 0, f"{IP}:8088", "")
    run.write(ClusterState("http://127.0.0.1:1", "m", (own,)))
    folder.rename(run.tables)
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)

    assert main(["collect-env", "--device-type", "cpu", "--run-dir", str(run.path)]) == 0

    out = capsys.readouterr().out
    assert f"prefill-0  {IP} devices 4,5 port 8088" in out
    assert "no scheduler answers at http://127.0.0.1:1" in out


def test_an_unreadable_run_folder_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "state.json").write_text("{}")

    assert main(["collect-env", "--device-type", "cpu"]) == 0
    assert f"{tmp_path}/state.json was not written by pdserve" in capsys.readouterr().out
    assert main(["collect-env", "--run-dir", str(tmp_path)]) == 2


def test_an_invalid_timeout_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--timeout", "0"]) == 2
    assert "--timeout is 0, but must be more than 0 and at most 3600 seconds" in capsys.readouterr().err
