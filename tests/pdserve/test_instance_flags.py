"""From the guide's command line and a table to an instance's config."""

import json
from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.instance_flags import check_tensor_parallel, launch, parse_instance_flags
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.launch_plan import LaunchPlan, resolve
from wire.errors import ConfigError
from wire.types import Role


def parse(argv: list[str]) -> EngineOptions:
    return parse_instance_flags(argv, {}).options


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return str(tmp_path)


def _plan(tmp_path: Path, number: int, ports: str | None = None, **environ: str) -> LaunchPlan:
    arguments = GenArguments(["4,5"], ["6,7"], True, str(tmp_path), "127.0.0.1", ports, "cpu")
    generated = gen(arguments, lambda line: None, {})
    return resolve(
        {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / generated.global_name),
            "RANK_TABLE_FILE_PATH": str(tmp_path / generated.instances[number].file_name),
            **environ,
        }
    )


@pytest.mark.parametrize("form", ["--port=8089", "--port 8089"])
def test_the_guides_flags_are_accepted_in_both_forms(tmp_path: Path, model: str, form: str) -> None:
    argv = [f"--model={model}", "--tensor-parallel-size=2", "--max-num-seqs", "8", "--host=0.0.0.0", *form.split()]
    argv += ["--max-model-len=4096", "--max-num-batched-tokens=4096", "--served-model-name", "name"]

    made = launch(parse(argv), _plan(tmp_path, 1))

    assert made.config.role is Role.DECODE
    assert made.config.device_ids == ("6", "7")
    assert made.config.options.port == 8089
    assert made.config.cores
    assert made.config.num_ranks == 2


def test_an_instance_without_a_port_uses_its_entrys(tmp_path: Path, model: str) -> None:
    made = launch(parse(["--model", model]), _plan(tmp_path, 0, ports="18088,18089"))

    assert made.config.options.port == 18088


def test_a_port_other_than_the_tables_is_refused_with_both(tmp_path: Path, model: str) -> None:
    plan = _plan(tmp_path, 1, ports="18088,18089")

    with pytest.raises(ConfigError, match=r"--port 18088 differs from 18089, the server_port of decode-0 in "):
        launch(parse(["--model", model, "--port", "18088"]), plan)
    assert launch(parse(["--model", model, "--port", "18089"]), plan).config.options.port == 18089


def test_node_ports_override_the_tables_port(tmp_path: Path, model: str) -> None:
    plan = _plan(tmp_path, 1, ports="18088,18089", NODE_PORTS="28088,28089")

    assert launch(parse(["--model", model, "--port", "28089"]), plan).config.options.port == 28089


def test_an_instance_without_any_port_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="--port is missing"):
        launch(parse(["--model", model]), _plan(tmp_path, 0))


def test_a_missing_model_folder_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/such/model"):
        launch(parse(["--model", "/no/such/model", "--port", "1"]), _plan(tmp_path, 0))


def test_an_instances_command_line_may_have_scheduler_flags(tmp_path: Path, model: str) -> None:
    options = parse(["--model", model, "--startup-timeout", "30"])

    assert options.model == model


def test_a_number_of_ranks_other_than_devices_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4 differs from the 2 devices .*\(4,5\)"):
        check_tensor_parallel(4, ("4", "5"))


def test_one_rank_for_each_device_is_accepted() -> None:
    check_tensor_parallel(None, ("0", "1"))
    check_tensor_parallel(1, ("0",))
    check_tensor_parallel(2, ("0", "1"))
