"""`ranktable doctor`, from its arguments to the screen and the exit status; line 118 of the checklist."""

import json
from pathlib import Path

import pytest

from ranktable_tools import doctor_command
from ranktable_tools.cli import main
from tests.ranktable_tools import recorded
from tests.ranktable_tools.stub_tools import write_stub

IP = "127.0.0.1"
CPU = ("--device-type", "cpu", "--url", "http://127.0.0.1:1")
_OTHERS = ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "LLM_TOOLS_PATH", "PDSERVE_SECRET_FILE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _a_plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*_OTHERS, *_PROXIES, "RANK_TABLE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_stub(tmp_path / "tools", "python", {}, other="python: No module named pdserve\n")
    monkeypatch.setenv("PDSERVE_PYTHON", str(tmp_path / "tools" / "python"))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    arguments = ["gen", "--prefill-server-list", "0", "--decode-server-list", "1", "--device-type", "cpu", "--ip", IP]
    assert main(arguments) == 0
    return [str(tmp_path / f"global_ranktable_{IP}.json"), str(tmp_path / f"local_ranktable_{IP}_0.json")]


def test_a_healthy_host_ends_with_0(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()

    assert main(["doctor", *CPU, *files]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ranktable doctor on ")
    assert "ok    tables          1 prefill, 1 decode; this process is prefill-0" in lines
    assert "to fix" not in lines[-1]


def test_a_failure_ends_with_status_1(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    secret = Path(files[0]).parent / "cluster_secret"
    secret.chmod(0o644)
    capsys.readouterr()

    assert main(["doctor", *CPU, *files]) == 1

    out = capsys.readouterr().out
    assert f"FAIL  secret          {secret} has mode 0644: others may have access" in out
    assert f"-> chmod 600 {secret}" in out


def test_json_names_every_check(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()

    assert main(["doctor", *CPU, "--format", "json", *files]) == 0

    reported = json.loads(capsys.readouterr().out)
    assert {"tables", "ports", "reach", "no_proxy", "cores", "versions", "links"} <= {
        finding["name"] for finding in reported["findings"]
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mib", "9999"], "--mib 9999 is not in 0..1024"),
        (["--timeout", "0"], "--timeout is 0, but must be more than 0 and at most 3600 seconds"),
        (
            ["--url", "http://a:99999"],
            "--url 'http://a:99999' is not the address of a scheduler: write http://HOST:PORT",
        ),
        (["--url", "https://a:1"], "--url 'https://a:1' is not the address of a scheduler: write http://HOST:PORT"),
        (["--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["none.json"], "none.json: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["doctor", *arguments]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ranktable: {message}")
    assert captured.err.count("\n") == 1


def test_ctrl_c_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_command, "examine", interrupted)

    assert main(["doctor", *CPU]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.covers("A8.118")
def test_each_step_of_the_guides_environment_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools"
    write_stub(tools, "docker", {"-v": "Docker version 24.0.7, build afdd53b\n"})
    write_stub(tools, "npu-smi", {"info": recorded.INFO_A2, "info -t board -i 0": recorded.BOARD})
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("LLM_TOOLS_PATH", "/none")

    main(["doctor", "--format", "json", "--device-type", "npu"])

    reported = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert "23.0.5" in reported["versions"]["words"]
    assert reported["cards"]["words"].endswith("2 x 910B4")
    assert reported["docker"]["words"] in ("Docker version 24.0.7, build afdd53b", "this is a container")
    assert "net.ipv4.ip_forward" in reported["ip_forward"]["words"]
    assert reported["LLM_TOOLS_PATH"]["words"] == "there is no /none/PD_separate/pd_ranktable_tools.py"
