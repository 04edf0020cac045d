"""vLLM as a contestant leaves nothing behind, however the benchmark ends; a script replaces it here."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.vllm import PeerMissing, Vllm

# It has a child, like vLLM; `python -u SCRIPT MODEL DTYPE REPLY_FD`.
_PEER = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
Path(__file__).with_name("pids").write_text(f"{{os.getpid()}} {{child.pid}}")
{does}
"""
_LOADED = """os.write(int(sys.argv[5]), b'{"version": "0.0"}\\n'); signal.pause()"""


def _home(folder: Path, does: str) -> Path:
    """Return a PEERS_HOME with a vLLM that runs this code."""
    python = folder / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PEER.format(python=sys.executable, does=does))
    python.chmod(0o755)
    return folder


def _process_fds(home: Path) -> list[int]:
    return [os.pidfd_open(int(pid)) for pid in (home / "vllm" / "bin" / "pids").read_text().split()]


def _ended(process_fds: list[int]) -> list[bool]:
    """Return for each process whether it ended in time; kill the others."""
    ended = [bool(select.select([process_fd], [], [], 30.0)[0]) for process_fd in process_fds]
    for process_fd, is_over in zip(process_fds, ended, strict=True):
        if not is_over:
            signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        os.close(process_fd)
    return ended


@pytest.fixture
def before() -> Iterator[set[str]]:
    """The open descriptors; none may be left over at the end."""
    open_ones = set(os.listdir("/proc/self/fd"))
    yield open_ones
    assert set(os.listdir("/proc/self/fd")) <= open_ones


@pytest.mark.usefixtures("before")
def test_vllm_is_ready_when_it_prints_so_and_ends_with_its_children(tmp_path: Path) -> None:
    home = _home(tmp_path, _LOADED)
    peer = Vllm(tmp_path, dtype="float32", environ={**os.environ, "PEERS_HOME": str(home)})
    process_fds = _process_fds(home)

    peer.close()

    assert peer.version == "0.0"
    assert _ended(process_fds) == [True, True]


@pytest.mark.usefixtures("before")
def test_a_vllm_that_exits_is_noticed_at_once(tmp_path: Path) -> None:
    home = _home(tmp_path, "child.kill()")

    with pytest.raises(PeerMissing, match="vLLM ended: see "):
        Vllm(tmp_path, dtype="float32", environ={**os.environ, "PEERS_HOME": str(home)})


@pytest.mark.long
@pytest.mark.usefixtures("before")
def test_ctrl_c_while_it_loads_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, process_fds, reply = _home(tmp_path, _LOADED), list[int](), Vllm._reply

    def broken_off(peer: Vllm, timeout_s: float) -> None:
        reply(peer, timeout_s)
        process_fds.extend(_process_fds(home))
        raise KeyboardInterrupt

    monkeypatch.setattr(Vllm, "_reply", broken_off)

    with pytest.raises(KeyboardInterrupt):
        Vllm(tmp_path, dtype="float32", environ={**os.environ, "PEERS_HOME": str(home)})

    assert _ended(process_fds) == [True, True]


_BENCHMARK = """
import os, signal
from pathlib import Path
from pdserve.bench.vllm import Vllm
peer = Vllm(Path("m"), dtype="float32")
print("stands still", flush=True)
signal.pause()
"""


@pytest.mark.long
def test_a_stalled_vllm_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    home = _home(tmp_path, _LOADED)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _BENCHMARK], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PEERS_HOME": str(home)},
    ) as benchmark:  # fmt: skip
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "stands still\n"
        process_fds = _process_fds(home)
        benchmark.kill()

    assert _ended(process_fds) == [True, True]
