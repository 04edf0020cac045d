"""The download process, over a hub on loopback: its answer, its refusals, and that it imports no torch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.hub.download_job import DownloadJob
from pdserve.hub.snapshot import find_snapshot
from tests.pdserve.hub.fake_hub import FakeHub
from wire.errors import ConfigError


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    with FakeHub({"facebook/opt-125m": folder}) as served:
        yield served


def environ(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token}


def test_the_librarys_own_cache_is_used_and_progress_goes_to_stderr(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshot = find_snapshot(DownloadJob("facebook/opt-125m"), environ(hub, tmp_path))

    reported = capfd.readouterr()
    assert Path(snapshot.folder).is_relative_to(tmp_path / "home" / "hub" / "models--facebook--opt-125m")
    assert (Path(snapshot.folder) / "model.safetensors").read_text() == "weights"
    assert {token for _, _, token in hub.seen} == {hub.token}
    assert (reported.out, [line.split()[0] for line in reported.err.splitlines()]) == (
        "",
        ["downloading", "downloaded"],
    )


def test_a_refusal_is_quoted(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add("facebook/opt-125m")

    with pytest.raises(ConfigError, match=r"^facebook/opt-125m is gated: accept its conditions"):
        find_snapshot(DownloadJob("facebook/opt-125m"), environ(hub, tmp_path))


def test_a_command_ends_with_status_2_and_advice(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pdserve",
        "model",
        "path",
        "facebook/opt-125m",
        "--download-dir",
        str(tmp_path),
    ]

    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 2
    assert done.stderr == (
        "pdserve model: --model facebook/opt-125m is not a local folder; HF_HUB_OFFLINE is set, and no copy is cached: "
        "run `pdserve model path facebook/opt-125m` with network access, or pass a folder\n"
    )


def test_downloading_imports_no_torch() -> None:
    code = (
        "import sys, pdserve.hub.fetching, huggingface_hub\n"
        "huggingface_hub.HfApi, huggingface_hub.hf_hub_download\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)

    assert done.stdout == "False False\n"
