"""The wheel as data: fetched once, never imported, and an error message where it is not available."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import MISSING
from tests.npu.ops import NpuOps
from tests.npu.wheel import OLDEST, VERSION, NoWheel, Wheel, cache_folder, wheel_in


def test_the_wheel_matches_the_tested_torch_and_has_the_files(wheel: Wheel) -> None:
    assert torch.__version__.startswith(VERSION.rpartition(".")[0])
    assert len(wheel.schemas()) > 400
    assert "class NPUGraph" in wheel.source("torch_npu/npu/graphs.py")
    assert not list(wheel.root.rglob("*.so"))
    assert "torch_npu" not in sys.modules


def test_without_an_index_the_reason_is_given_and_nothing_is_left(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}

    with pytest.raises(NoWheel, match=f"pip download torch-npu=={VERSION} failed: "):
        wheel_in(tmp_path, environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})

    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_torchs_own_ops_are_unchanged(npu_ops: NpuOps) -> None:
    image, kernel = torch.empty(1, 2, 8, 8, device="meta"), torch.empty(4, 2, 3, 3, device="meta")

    assert torch.nn.functional.conv2d(image, kernel).shape == (1, 4, 6, 6)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::matmul_backward", "Meta")
    assert len(npu_ops.schemas) > 400


@pytest.mark.long
@pytest.mark.usefixtures("npu_ops")
def test_the_contract_holds_for_the_oldest_wheel() -> None:
    files = ("test_names.py", "test_wrong_calls.py", "test_attention.py", "test_modules.py", "test_graphs.py")
    try:
        wheel_in(cache_folder(), os.environ, OLDEST)
    except NoWheel as error:
        pytest.skip(f"{MISSING}: the torch_npu wheel: {error}")

    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-rs",
        *(str(Path(__file__).with_name(name)) for name in files),
    ]
    done = subprocess.run(
        command, env=os.environ | {"PDSERVE_TEST_TORCH_NPU": OLDEST}, capture_output=True, text=True, timeout=500
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
