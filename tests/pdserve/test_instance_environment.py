"""Variables are set before anything that reads them is imported."""

from dataclasses import replace
from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.instance_environment import prepare_environment
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.devices.tools import ToolOutput
from ranktable_tools.launch_plan import LaunchPlan, resolve
from wire.errors import ConfigError

GPUS = "".join(f"{i}, GPU-{i}, NVIDIA H200, 570.1, 1, 143771\n" for i in range(8))


def _plan(folder: Path) -> LaunchPlan:
    made = gen(GenArguments(["4,5"], ["6,7"], True, str(folder), "127.0.0.1", None, "cpu"), lambda line: None, {})
    return resolve(
        {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / made.global_name),
            "RANK_TABLE_FILE_PATH": str(folder / made.instances[1].file_name),
        }
    )


def _tool(folder: Path) -> dict[str, str]:
    (folder / "nvidia-smi").touch(mode=0o755)
    return {"PATH": str(folder)}


def test_a_gpu_instance_gets_its_entrys_cards(tmp_path: Path) -> None:
    environ = _tool(tmp_path)

    made = prepare_environment(
        EngineOptions(device="cuda"), _plan(tmp_path), environ, run=lambda command: ToolOutput(tuple(command), GPUS, 0)
    )

    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-6,GPU-7"
    assert made.device_line is not None
    assert "rank 0 = device 6 on GPU-6, rank 1 = device 7 on GPU-7" in made.device_line


def test_a_cpu_instance_hides_the_table_from_torch_npu(tmp_path: Path) -> None:
    environ = _tool(tmp_path)
    before = dict(environ)
    environ["RANK_TABLE_FILE"] = "/hccl.json"

    for device in ("auto", "cpu"):
        made = prepare_environment(replace(EngineOptions(), device=device), _plan(tmp_path), environ, dev=tmp_path)
        assert (made.device, made.device_line, made.network, environ) == (device, None, {}, before)


def test_auto_finds_the_entrys_cards_before_opening_any(tmp_path: Path) -> None:
    environ = _tool(tmp_path)
    (tmp_path / "nvidia0").touch()

    made = prepare_environment(
        EngineOptions(), _plan(tmp_path), environ, run=lambda command: ToolOutput(tuple(command), GPUS, 0), dev=tmp_path
    )

    assert (made.device, environ["CUDA_VISIBLE_DEVICES"]) == ("auto", "GPU-6,GPU-7")
    assert made.device_line is not None
    assert made.device_line.endswith("(CUDA_VISIBLE_DEVICES=GPU-6,GPU-7), if the cards are usable")


def test_auto_uses_the_cpu_with_the_reason_if_cards_are_hidden(tmp_path: Path) -> None:
    environ, one = _tool(tmp_path), GPUS.splitlines(keepends=True)[0]
    (tmp_path / "nvidia0").touch()
    before = dict(environ)

    made = prepare_environment(
        EngineOptions(), _plan(tmp_path), environ, run=lambda command: ToolOutput(tuple(command), one, 0), dev=tmp_path
    )

    assert (made.device, environ) == ("cpu", before)
    assert made.device_line is not None
    assert made.device_line.startswith("devices: the CPU, because 1 cuda card is visible here (0), ")
    with pytest.raises(ConfigError, match="1 cuda card is visible here"):
        prepare_environment(
            EngineOptions(device="cuda"), _plan(tmp_path), environ,
            run=lambda command: ToolOutput(tuple(command), one, 0), dev=tmp_path,
        )  # fmt: skip
