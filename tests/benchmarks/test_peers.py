"""The peers' set-up reports what it cannot do; their runners detect wrong bytes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


def load(name: str) -> ModuleType:
    """Import a runner's module from its folder."""
    spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_up(tmp_path: Path, *peers: str) -> "subprocess.CompletedProcess[str]":
    """Run the script where there is neither iperf3 nor apt-get."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "head", "id", "mkdir"):
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    env = {**os.environ, "PATH": str(folder), "PEERS_HOME": str(tmp_path / "peers")}
    command = [str(folder / "bash"), str(PEERS / "setup"), *peers]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_an_unknown_peer_is_refused_with_the_known_names(tmp_path: Path) -> None:
    ran = set_up(tmp_path, "carrier")

    assert ran.returncode == 2
    assert "'carrier'" in ran.stderr
    assert "mooncake" in ran.stderr


def test_without_apt_the_missing_package_is_named(tmp_path: Path) -> None:
    ran = set_up(tmp_path, "iperf3")

    assert ran.returncode == 1
    assert "'iperf3'" in ran.stderr
    assert "no apt-get" in ran.stderr
    assert "not installed: iperf3" in ran.stderr


def test_a_single_wrong_byte_is_detected() -> None:
    region = load("peer_process").Region((2 << 20) + 5)
    region.fill()
    assert region.holds_pattern((2 << 20) + 5)

    region.view[(2 << 20) + 4] ^= 1

    assert region.holds_pattern((2 << 20) + 4)
    assert not region.holds_pattern((2 << 20) + 5)


def test_regions_differ_page_by_page() -> None:
    pattern = load("peer_process").pattern

    assert pattern(1) != pattern(2)
    assert len(pattern(1)) == len(pattern(2)) == 1 << 20


def test_the_runners_print_their_usage() -> None:
    for name in ("nixl_peer", "mooncake_peer", "run"):
        command = [sys.executable, str(PEERS / f"{name}.py"), "--help"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)

        assert ran.returncode == 0, ran.stderr
        assert "PEERS_HOME" in ran.stdout
