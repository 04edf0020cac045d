"""A real cluster whose KV goes over process_group: its answers equal those of one process, and of transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.guide import GuideCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_cluster_over_process_group_agrees_with_transformers(tiny_model: Path) -> None:
    command = [
        sys.executable, "-P", "-m", "pdserve", "verify", "--kv-cache-memory", "16MiB", "--model", str(tiny_model),
        "--prompts", "6", "--max-tokens", "16", "--transport", "process_group",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "equal: P/D over process_group = combined = transformers"


def test_fake_instances_load_torch_only_when_the_transport_is_named(tmp_path: Path, fake_model: Path) -> None:
    loaded = {}
    for name, flags in (("named", ("--kv-transport=process_group",)), ("default", ())):
        folder = tmp_path / name
        folder.mkdir()
        with GuideCluster(folder, fake_model, flags=("--engine=fake", *flags)) as cluster:
            cluster.up()
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 8}
            assert cluster.client.post("/v1/completions", body).status == 200
            loaded[name] = [_has_torch(cluster.processes[part].pid) for part in ("prefill-0", "decode-0")]

    assert loaded == {"named": [True, True], "default": [False, False]}


def _has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
