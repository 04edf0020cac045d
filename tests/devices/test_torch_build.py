"""Which torch goes with which device: extras, pins and images agree, and a wrong pair is refused with a message."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from devices.npu import MIN_VERSION
from devices.torch_build import cuda_of_torch, unfit
from devices.versions import MIN_CANN, numbers

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def install(folder: Path, torch: str, cuda: str | None, torch_npu: str | None = None) -> None:
    """Write packages of these versions into `folder`, as pip would."""
    for name, version, requires in (
        ("torch", torch, ""),
        ("torch_npu", torch_npu, f"Requires-Dist: torch=={'.'.join((torch_npu or '').split('.')[:2])}.*\n"),
    ):
        if version is None:
            continue
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "torch" / "version.py").write_text(
        f"__version__ = '{torch}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    )


def run_check(folder: Path, device: str, pin: str = "2.13.0") -> tuple[int, str]:
    """Return the status and output of the check, run in a Python that sees only `folder` and our clone."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]; from devices.torch_build import main; sys.exit(main({[device, pin]!r}))"  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("torch", "cuda", "torch_npu", "device", "message"),
    [
        ("2.13.0+cpu", None, None, "cpu", ""),
        ("2.13.0", "13.0", None, "cpu", ""),
        ("2.13.0", "13.0", None, "cuda", ""),
        ("2.13.0+cu128", "12.8", None, "cuda", ""),
        ("2.13.0+cpu", None, None, "npu", ""),
        ("2.10.1+cpu", None, "2.10.0.post4", "npu", ""),
        ("2.13.0+cpu", None, None, "cuda", "torch 2.13.0+cpu is a build without CUDA: --device cuda needs"),
        ("2.13.0", "13.0", None, "npu", "torch 2.13.0 is a build for CUDA 13.0: --device npu needs"),
        ("2.14.0+cpu", None, None, "npu", "torch 2.14.0+cpu does not match torch_npu 2.13.0, which needs torch 2.13"),
        ("2.13.0+cpu", None, "2.12.0", "npu", "torch 2.13.0+cpu does not match torch_npu 2.12.0, which needs"),
    ],
)
def test_a_torch_for_another_device_is_refused_with_both(
    torch: str, cuda: str | None, torch_npu: str | None, device: str, message: str, tmp_path: Path
) -> None:
    install(tmp_path, torch, cuda, torch_npu)

    status, words = run_check(tmp_path, device)

    assert status == (1 if message else 0)
    assert words.startswith(message)
    assert bool(words) == bool(message)


def test_no_torch_is_reported(tmp_path: Path) -> None:
    assert run_check(tmp_path, "npu") == (1, "torch is not installed")


def test_the_installed_torchs_build_is_read_from_its_version() -> None:
    import torch

    assert cuda_of_torch() == torch.version.cuda
    assert (unfit("cuda", PINS["torch_npu"]) is None) == (torch.version.cuda is not None)


def test_install_refuses_a_wrong_pair_before_installing(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in ("scripts", "devices", "wire"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) echo "$*" >> {tmp_path}/pip; exit 1 ;; esac\nexec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    install(tmp_path / "site", "2.13.0", "13.0")

    done = subprocess.run(
        ["/bin/sh", str(clone / "scripts" / "install"), "--device", "npu"], capture_output=True, text=True, timeout=300,
        check=False, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip

    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "scripts/install: torch 2.13.0 is a build for CUDA 13.0: --device npu needs the CPU build (+cpu); nothing else"
        in done.stderr
    )
    assert not (tmp_path / "pip").exists()


def test_extras_pins_and_images_agree() -> None:
    minimum = ".".join(map(str, MIN_VERSION))
    ascend = (ROOT / "deploy" / "docker" / "Dockerfile.ascend").read_text()
    cann = re.search(r"quay\.io/ascend/cann:([0-9.]+)-", ascend)

    assert EXTRAS["npu"] == [f"torch_npu>={minimum}"]
    assert EXTRAS["cuda"] == ["torch>=2.10"]
    assert next(one for one in EXTRAS["engine"] if one.startswith("torch>")) == "torch>=2.10"
    assert numbers(PINS["torch_npu"])[:2] == numbers(PINS["torch"])[:2]
    assert numbers(PINS["torch_npu"]) >= MIN_VERSION
    assert cann is not None
    assert numbers(cann[1]) >= numbers(MIN_CANN)
    for kind in ("ascend", "cuda", "cpu"):
        text = (ROOT / "deploy" / "docker" / f"Dockerfile.{kind}").read_text()
        assert f"install_pdserve.sh {kind if kind != 'ascend' else 'npu'}" in text


def test_the_doctor_requires_the_same_releases() -> None:
    from ranktable_tools.containers import image_plan
    from ranktable_tools.doctor import versions as doctor

    assert (numbers(doctor.MIN_TORCH_NPU), doctor.MIN_CANN) == (MIN_VERSION, MIN_CANN)
    assert image_plan._MIN_TORCH == MIN_VERSION
