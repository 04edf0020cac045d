"""The base package in its own environment, without torch: the scheduler, and a cluster of the fake engine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.guide import CLONE, GuideCluster
from tests.cluster.pdserve_command import Pdserve
from tests.pdserve.hub.printed_models import OPT, hub_environment, printed_models

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# With everything hidden: another worker of the tests writes its examples there in the meantime.
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "docs")


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the base package from a copy of the clone (an install writes into its source)."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(CLONE, folder / "clone", ignore=_LEFT_OUT)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [
            str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", str(folder / "clone"),
            "--constraint", str(CLONE / "constraints.txt"),
        ],
        check=True, timeout=500, stdout=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    return python


def test_the_base_package_installs_no_torch(base_python: Path) -> None:
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('torch', 'transformers', 'numpy')))"

    assert subprocess.run([str(base_python), "-P", "-c", code], timeout=300).returncode == 0


def test_a_scheduler_without_torch_serves(base_python: Path, tmp_path: Path, tiny_model: Path) -> None:
    with GuideCluster(tmp_path, tiny_model, flags=("--dtype=float32", "--kv-cache-memory=16MiB")) as cluster:
        cluster.start("prefill-0", "decode-0")
        cluster.start("scheduler", env={"PDSERVE_PYTHON": str(base_python), "PYTHONPATH": ""})
        cluster.wait_ready()

        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        reply = cluster.client.post("/v1/chat/completions", chat)
        assert reply.status == 200, reply.body
        process = Path("/proc", str(cluster.processes["scheduler"].pid))
        assert (process / "cmdline").read_text().split("\0")[0] == str(base_python)
        assert "torch" not in (process / "maps").read_text()
        cluster.wait_idle()


def test_a_cluster_without_torch_serves_beside_files_of_its_names(
    base_python: Path, tmp_path: Path, fake_model: Path
) -> None:
    for name in ("batch.py", "engine.py", "native.py"):
        (tmp_path / name).write_text("raise ImportError('this is a file of the user')\n")
    pdserve = Pdserve(tmp_path / "run", fake_model)
    pdserve.program, pdserve.cwd = (str(base_python), "-m", "pdserve"), tmp_path
    pdserve.environ["PYTHONPATH"] = ""

    up = pdserve.up()
    assert up.returncode == 0, up.stderr
    try:
        reply = pdserve.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        assert reply.status == 200, reply.body
    finally:
        assert pdserve("down").returncode == 0


def test_a_scheduler_without_torch_finds_model_and_tokenizer(base_python: Path, tmp_path: Path) -> None:
    flags = ("--dtype=float32", "--kv-cache-memory=16MiB")
    with (
        printed_models(tmp_path / "repos", [OPT]) as hub,
        GuideCluster(tmp_path, Path(OPT), flags=flags) as cluster,
    ):
        alone = {"PDSERVE_PYTHON": str(base_python), "PYTHONPATH": ""}
        cluster.start("scheduler", env=hub_environment(hub, tmp_path / "other-host") | alone)
        cluster.start("prefill-0", "decode-0", env=hub_environment(hub, tmp_path))
        cluster.wait_ready()

        reply = cluster.client.post("/v1/completions", {"model": OPT, "prompt": "San Francisco is a", "max_tokens": 7})
        assert reply.status == 200, reply.body
        assert not list((tmp_path / "other-host").rglob("*.bin"))
        assert [file.name for file in (tmp_path / "other-host").rglob("tokenizer.json")] == ["tokenizer.json"]


def test_a_missing_engine_is_reported_with_the_extra_to_install(base_python: Path) -> None:
    done = subprocess.run(
        [str(base_python), "-P", "-m", "pdserve", "serve", "/no/model"], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
