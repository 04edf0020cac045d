"""Workers of another engine, started by the guide's shells and by `pdserve up` or running: fake ones, not vLLM."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from ranktable_tools.commands import GenArguments, gen
from tests.cluster.guide import CLONE, GuideCluster, Tables
from tests.cluster.pdserve_command import Pdserve
from tests.engine.tiny_models import VOCAB_SIZE
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

_SETTINGS = json.dumps({"fake": {"vocab_size": VOCAB_SIZE}})
_PROGRAM = ("env", f"PYTHONPATH={CLONE}", sys.executable, "-P", "-m", "testing.vllm_worker", "--settings", _SETTINGS)
_VARIABLES = {"PDSERVE_VLLM_COMMAND": shlex.join(_PROGRAM)}
_LENGTH = ("--max-model-len", "512")
_BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "connector"),
    [((), "NixlConnector"), (("--connector", "nixl-push"), "NixlPushConnector")],
)
def test_the_guides_shells_start_and_serve_workers(
    tmp_path: Path, fake_model: Path, flags: tuple[str, ...], connector: str
) -> None:
    made = gen(
        GenArguments(["4,5"], ["6,7"], True, str(tmp_path), None, None, "cpu", worker="vllm"), lambda line: None, {}
    )
    tables = Tables(tmp_path / made.global_name, tuple(tmp_path / local.file_name for local in made.locals))
    variables = _VARIABLES | {"PDSERVE_WORKER": "vllm"}
    with GuideCluster(tmp_path, fake_model, flags=(*_LENGTH, *flags), tables=tables) as cluster:
        for name, port in zip(("prefill-0", "decode-0"), free_ports(2), strict=True):
            cluster.start(name, env=variables | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})
        cluster.start("scheduler", env=variables)
        cluster.wait_ready()

        reply = cluster.client.post("/v1/completions", _BODY)

        assert reply.status == 200, reply.body
        assert reply.json()["usage"]["completion_tokens"] == 8
        lines = {name: cluster.processes[name].log for name in ("prefill-0", "decode-0", "scheduler")}
        assert [f'"{connector}"' in log for log in lines.values()] == [True, True, False]
        assert ["kv_producer" in log for log in lines.values()] == [True, False, False]
        assert ["kv_consumer" in log for log in lines.values()] == [False, True, False]


def test_up_starts_serves_and_restarts_workers(tmp_path: Path, fake_model: Path) -> None:
    pdserve = Pdserve(tmp_path / "run", fake_model)
    pdserve.engine, pdserve.environ = ("--worker", "vllm", *_LENGTH), _VARIABLES
    try:
        up = pdserve.up()
        assert up.returncode == 0, up.stderr
        first = pdserve.client.post("/v1/completions", _BODY)
        assert first.status == 200, first.body

        decode = pdserve.record("decode-0")
        os.kill(decode.pid, signal.SIGKILL)
        pdserve.wait_replaced(decode)

        again = pdserve.client.post("/v1/completions", _BODY)
        assert again.status == 200, again.body
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        status = pdserve("status").stdout
        rows = [line.split() for line in status.splitlines()[2:5]]
        assert [(row[0], row[4]) for row in rows] == [
            ("prefill-0", "living"),
            ("decode-0", "living"),
            ("scheduler", "running"),
        ]
    finally:
        assert pdserve("down").returncode == 0
    assert "SIGKILL" in (pdserve.folder.log("supervisor")).read_text()


@pytest.mark.long
@pytest.mark.parametrize("num_own", [0, 1])
def test_up_serves_workers_that_run_already_and_leaves_them(tmp_path: Path, fake_model: Path, num_own: int) -> None:
    ports = free_ports(2)
    workers = [subprocess.Popen([*_PROGRAM, "--port", str(port)]) for port in ports]
    prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"prefill: {num_own}\ndecode: {num_own}\nprefill-workers: [{prefill}]\ndecode-workers: [{decode}]\n"
    )
    pdserve = Pdserve(tmp_path / "run", fake_model)
    pdserve.engine = ("--engine", "fake", *_LENGTH)
    try:
        up = pdserve.up("--config", str(file))
        assert up.returncode == 0, up.stderr
        reply = pdserve.client.post("/v1/completions", _BODY)
        assert reply.status == 200, reply.body
        ready = pdserve.client.get("/ready").json()["instances"]
        assert sum(one["address"] in (prefill, decode) for one in ready) == 2
        assert len(ready) == 2 + 2 * num_own
        assert pdserve("status").returncode == 0
        assert pdserve("down").returncode == 0
        assert [worker.poll() for worker in workers] == [None, None]
    finally:
        pdserve("down")
        for worker in workers:
            worker.kill()
            worker.wait(60)


@contextmanager
def _route(
    folder: Path, model: Path, *flags: str, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Client, list[Client]]]:
    """Start a prefill and a decode worker, each with these changes, and `pdserve route` in front of them."""
    *ports, port = free_ports(3)
    settings = {"model": "tiny", "fake": {"vocab_size": VOCAB_SIZE, "step_seconds": 0.01}}
    command = ("env", f"PYTHONPATH={CLONE}", sys.executable, "-P", "-m")
    workers = [
        subprocess.Popen(
            [*command, "testing.vllm_worker", "--port", str(at), "--settings", json.dumps(settings | (changes or {}))]
        )
        for at, changes in zip(ports, (prefill, decode), strict=True)
    ]
    clients = [Client(f"http://127.0.0.1:{at}") for at in ports]
    urls = [f"--{role}={client.base_url}" for role, client in zip(("prefill", "decode"), clients, strict=True)]
    own = ("--model", str(model), "--served-model-name", "tiny", "--port", str(port), "--run-dir", str(folder))
    started = [*command, "pdserve", "route", *urls, *own, *flags]
    route = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield route, Client(f"http://127.0.0.1:{port}"), clients
    finally:
        route.kill()
        route.communicate(timeout=60)
        for worker in workers:
            worker.kill()
            worker.wait(60)


@pytest.mark.long
def test_ctrl_c_ends_route_after_its_requests_not_its_workers(tmp_path: Path, fake_model: Path) -> None:
    with _route(tmp_path / "run", fake_model) as (route, client, workers):
        _wait_ready(route, client)
        assert client.post("/v1/completions", _BODY).status == 200
        events = client.stream("/v1/completions", _BODY | {"stream": True, "max_tokens": 100})
        next(events)
        route.send_signal(signal.SIGINT)
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        output, _ = route.communicate(timeout=60)

        assert (route.returncode, reasons[-1]) == (0, "length"), output
        assert not (tmp_path / "run" / "tables").exists()
        for worker in workers:
            lines = worker.get("/metrics").body.decode().splitlines()
            running = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running")]
            assert list(map(float, running)) == [0.0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "changes", "at", "why"),
    [
        ((), {"decode": {"version": "0.1"}}, 1, "engines differ: "),
        (("--startup-timeout", "5"), {"prefill": {"connector": "none"}}, 0, "is its --kv-transfer-config set?"),
    ],
    ids=["another version", "no connector"],
)
def test_route_over_workers_that_cannot_serve_ends_with_status_2(
    flags: tuple[str, ...], changes: dict[str, Any], at: int, why: str, tmp_path: Path, fake_model: Path
) -> None:
    with _route(tmp_path / "run", fake_model, *flags, **changes) as (route, _, workers):
        output, _ = route.communicate(timeout=120)

        assert route.returncode == 2, output
        assert why in output
        assert workers[at].base_url in output


def _wait_ready(route: "subprocess.Popen[str]", client: Client) -> None:
    deadline = time.monotonic() + 120.0
    while True:
        try:
            if client.get("/ready").status == 200:
                return
        except Unavailable:
            pass
        assert route.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)
