"""The guide's own commands, as printed, from gen to a request on port 9000: one machine, a network namespace."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.readiness import check_ready
from tests.cluster.guide import CLONE, START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.cluster.hosts import COMMAND_TIMEOUT_S, Network, obstacle
from tests.deploy.guide_lines import GEN, PORTS, start

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]
_POLL_S = 0.05


@pytest.fixture
def long_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with the 4096 positions that the guide's --max-model-len takes."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


@contextmanager
def _run_line(
    line: str, before: tuple[str, ...], folder: Path, log: Path, environ: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        shell = subprocess.Popen(
            [*before, "sh", "-c", line], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
            env=environ, start_new_session=True,
        )  # fmt: skip
    try:
        yield shell
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(STOP_TIMEOUT_S) in (0, -signal.SIGTERM), log.read_text()
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(COMMAND_TIMEOUT_S)


def _wait_ready(client: Client, shells: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not check_ready(client)[0]:
        running = all(shell.poll() is None for shell in shells)
        assert running, "\n".join(log.read_text() for log in logs)
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
        time.sleep(_POLL_S)


def test_a8_the_guides_commands_serve_as_printed(tmp_path: Path, long_model: Path) -> None:
    folder, programs = tmp_path / "guide", tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    environ = {
        **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PDSERVE_PYTHON": sys.executable,
        "LLM_TOOLS_PATH": "AscendCloud/AscendCloud-LLM/llm_tools", "model": str(long_model),
    }  # fmt: skip
    subprocess.run(
        ["sh", str(CLONE / "deploy" / "link_guide_paths"), str(folder)], check=True, timeout=300, env=environ
    )
    with Network(("machine",), first=18) as network, ExitStack() as stack:
        machine, client = network.hosts["machine"], Client(f"http://127.0.0.1:{PORTS['host']}", timeout_s=300.0)
        subprocess.run([*machine.before, "sh", "-c", GEN], check=True, timeout=300, cwd=folder, env=environ)
        for table in (folder / "save_dir").iterdir():
            shutil.copy(table, folder)
        logs = [tmp_path / f"{end}.log" for end in PORTS]
        shells = [
            stack.enter_context(_run_line(start(end), machine.before, folder, log, environ))
            for end, log in zip(PORTS, logs, strict=True)
        ]
        stack.enter_context(machine.entered())
        _wait_ready(client, shells, logs)
        body = {"model": "model-name", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        reply = client.post("/v1/completions", body)

    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["completion_tokens"] == 8
