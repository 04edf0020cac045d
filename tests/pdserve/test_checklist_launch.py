"""Lines 100 to 114 of the checklist, as far as one process shows them: the errors that end start_servers.sh."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve import launch, role_process
from pdserve.ports import free_ports
from ranktable_tools.commands import GenArguments, gen
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer

VARIABLES = ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "USE_OPENAI")
Start = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def start(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Start one process of 1P1D with more flags and variables than the guide's; return its last line."""
    made = gen(GenArguments(["4,5"], ["6,7"], True, str(tmp_path), "127.0.0.1", None, "cpu"), lambda line: None, {})
    files = dict(zip(("prefill", "decode", "scheduler"), made.locals, strict=True))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def started(name: str, *flags: str, **variables: str | None) -> str:
        guide: dict[str, str | None] = {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / made.global_name),
            "RANK_TABLE_FILE_PATH": str(tmp_path / files[name].file_name),
            "NODE_PORTS": "8088,8089",
        }
        for variable, value in (guide | variables).items():
            if value is not None:
                monkeypatch.setenv(variable, value)
        status = launch.main([f"--model={model}", "--port", "1", *flags])
        lines = capsys.readouterr().err.splitlines()
        assert status == 2, lines
        assert len(lines) == 1
        return lines[0]

    return started


@pytest.mark.covers("A8.100", "A8.101")
@pytest.mark.parametrize("name", ["prefill", "scheduler"])
@pytest.mark.parametrize("variable", VARIABLES[:2], ids=["a8_100", "a8_101"])
def test_each_table_is_required_readable_json(tmp_path: Path, start: Start, name: str, variable: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")

    assert f"{variable} is not set" in start(name, **{variable: None})
    assert f"{variable}: " in (output := start(name, **{variable: str(tmp_path / "none.json")}))
    assert "none.json" in output
    assert f"{variable}: {broken}" in start(name, **{variable: str(broken)})


@pytest.mark.covers("A8.102")
@pytest.mark.parametrize("value", ["8088", "8088,8089,8090", "8088,x", ""])
def test_node_ports_match_the_tables_instances(start: Start, value: str) -> None:
    assert "NODE_PORTS is" in start("scheduler", NODE_PORTS=value)


@pytest.mark.covers("A8.102")
def test_an_instance_ignores_node_ports(start: Start) -> None:
    assert "NODE_PORTS" not in start("prefill", "--tensor-parallel-size=4", NODE_PORTS="nonsense")


@pytest.mark.parametrize(
    ("port", "node_ports", "has_for_another"),
    [
        ("8089", "8088,8089", None),
        ("8090", "8088,8089", None),
        ("8089", "nonsense", None),
        ("8089", "8089,8088", "the scheduler expects decode-0 on port 8088, and --port is 8089, which is the port of"),
        ("8088", "8088,8089", "the scheduler expects decode-0 on port 8089, and --port is 8088, which is the port of"),
    ],
    ids=["in-order", "not-in-it", "does-not-fit", "other-order-or-table-changed", "container-publishes-8088-as-8089"],
)
def test_an_instance_warns_if_node_ports_has_its_port_elsewhere(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    port: str, node_ports: str, has_for_another: str | None,
) -> None:  # fmt: skip
    made = gen(GenArguments(["4,5"], ["6,7"], True, str(tmp_path), "127.0.0.1", None, "cpu"), lambda line: None, {})
    monkeypatch.setenv("GLOBAL_RANK_TABLE_FILE_PATH", str(tmp_path / made.global_name))
    monkeypatch.setenv("RANK_TABLE_FILE_PATH", str(tmp_path / made.locals[1].file_name))
    monkeypatch.setenv("NODE_PORTS", node_ports)
    monkeypatch.setattr(role_process, "run", lambda argv, plan, marks: 0)

    assert launch.main([f"--model={model}", "--port", port]) == 0

    output = capsys.readouterr().err
    if has_for_another is None:
        assert output == ""
    else:
        assert output.startswith(f'warning: NODE_PORTS is "{node_ports}": {has_for_another} prefill-0: ')
        assert output.count("\n") == 1


@pytest.mark.covers("A8.104")
@pytest.mark.parametrize("value", ["2", "yes", ""])
def test_use_openai_is_0_or_1(start: Start, value: str) -> None:
    assert f'USE_OPENAI is "{value}": must be 1' in start("scheduler", USE_OPENAI=value)


@pytest.mark.covers("A8.104")
@pytest.mark.parametrize("output", [{}, {"USE_OPENAI": "1"}], ids=["unset", "1"])
def test_use_openai_unset_is_1(tmp_path: Path, output: dict[str, str]) -> None:
    made = gen(GenArguments(["4,5"], ["6,7"], True, str(tmp_path), "127.0.0.1", None, "cpu"), lambda line: None, {})
    environ = {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / made.global_name),
        "RANK_TABLE_FILE_PATH": str(tmp_path / made.locals[-1].file_name),
        "NODE_PORTS": "8088,8089",
    }

    plan = launch.plan_of(["--model=m"], environ | output)

    assert (plan.role, plan.use_openai) == ("scheduler", True)


@pytest.mark.covers("A8.107")
def test_a_host_that_is_not_local_is_named(start: Start) -> None:
    assert "192.0.2.1" in start("decode", "--host=192.0.2.1")


@pytest.mark.covers("A8.108")
def test_a_port_is_a_single_number(start: Start) -> None:
    assert "--port 70000 is not in 1..65535" in start("decode", "--port", "70000")


def test_http_port_is_free_and_differs_from_port(start: Start) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = listener.getsockname()[1]

        output = start("decode", "--port", "8089", "--http-port", "8089")
        assert "--http-port 8089 equals --port 8089: use two different ports" in output
        output = start("decode", "--port", str(free_ports(1)[0]), "--http-port", str(busy))
        assert f"--http-port {busy} on 127.0.0.1: in use by another process" in output


@pytest.mark.covers("A8.109")
def test_a_missing_model_is_named(start: Start) -> None:
    assert start("decode", "--model=/no/such/model") == "pdserve.launch: --model /no/such/model is not a folder"


@pytest.mark.parametrize("flag", ["--model=/no/such/model", "--port=0"])
def test_a_wrong_flag_is_named_before_any_other_output(
    start: Start, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output: list[object] = []
    monkeypatch.setattr(launch, "say", output.append)

    start("decode", flag)

    assert output == []


@pytest.mark.covers("A8.110")
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_max_num_seqs_is_a_number_from_1(start: Start, value: str) -> None:
    assert "--max-num-seqs" in start("prefill", f"--max-num-seqs={value}")


@pytest.mark.covers("A11.15", "A8.112")
@pytest.mark.parametrize("name", ["prefill", "decode", "scheduler"])
def test_a_step_smaller_than_the_model_ends_every_role(start: Start, name: str) -> None:
    output = start(name, "--max-model-len=4096", "--max-num-batched-tokens=2048")

    assert "--max-num-batched-tokens 2048 is below --max-model-len 4096" in output


@pytest.mark.covers("A8.113")
def test_the_ranks_are_the_local_tables_devices(start: Start) -> None:
    output = start("prefill", "--tensor-parallel-size=4")

    assert "--tensor-parallel-size 4 differs from the 2 devices of the local ranktable (4,5)" in output


@pytest.mark.covers("A8.114")
def test_quantization_matches_the_checkpoint(start: Start) -> None:
    output = start("prefill", "--quantization=awq")

    assert "--quantization awq" in output


def test_help_is_that_of_start_servers_and_not_the_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--help"]) == 0

    output = capsys.readouterr().out
    assert "usage: start_servers.sh [flags]\n" in output
    assert "The front door" not in output
    assert "--tensor-parallel-size" in output
