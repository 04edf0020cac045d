"""`pdserve verify` and `pdserve serve` on a tiny model: P/D, combined and transformers agree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.transport_table import NAMES
from pdserve.ports import free_ports
from tests.cluster.one_process import client_of
from tests.engine.tiny_models import KINDS, make_tiny_model

pytestmark = pytest.mark.cluster


def _verify(*flags: str, timeout_s: int = 200) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "pdserve", "verify", "--kv-cache-memory", "16MiB", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def _assert_each_equal(done: "subprocess.CompletedProcess[str]") -> None:
    """Every available transport was equal; the others are named with what this machine lacks."""
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    not_run = dict(re.findall(r"^not run: P/D over (\w+): (.+)$", done.stdout, re.M))
    ways = [f"P/D over {name}" for name in NAMES if name not in not_run]
    assert {"P/D over shm", "P/D over process_group", "P/D over tcp"} <= set(ways), not_run
    shown = f" (not run: {', '.join(not_run)})" if not_run else ""
    assert done.stdout.splitlines()[-1] == f"equal: {' = '.join([*ways, 'combined', 'transformers'])}{shown}"


@pytest.mark.long
def test_combined_pd_over_tcp_and_transformers_are_equal_in_float32(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--transport", "tcp", "--prompts", "9", "--max-tokens", "16")

    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert re.search(r"^served by P/D over tcp: [1-9][0-9,]* bytes of KV sent$", done.stdout, re.M)
    assert done.stdout.splitlines()[-1] == "equal: P/D over tcp = combined = transformers"
    assert re.search(r"^the next turn, combined: KV of [1-9][0-9]* generated tokens reused$", done.stdout, re.M)
    assert "equal: the next turn, combined = transformers" in done.stdout.splitlines()


@pytest.mark.long
def test_each_transport_is_equal_in_float32(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--transport", "each", "--prompts", "9", "--max-tokens", "16")

    _assert_each_equal(done)


def test_one_transport_can_be_named_and_an_unknown_one_is_refused(tiny_model: Path) -> None:
    refused = _verify("--model", str(tiny_model), "--transport", "carrier-pigeon")

    assert refused.returncode == 2
    assert "carrier-pigeon" in refused.stderr
    assert all(name in refused.stderr for name in ("each", *NAMES))


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_every_tested_family_is_equal_in_float32(kind: str, tmp_path: Path) -> None:
    done = _verify("--model", str(make_tiny_model(kind, tmp_path)), "--prompts", "6", "--max-tokens", "16")

    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.long
def test_the_default_model_is_equal_in_float32_over_each_transport() -> None:
    done = _verify(
        "--transport", "each", "--prompts", "6", "--max-tokens", "16", "--kv-cache-memory", "128MiB", timeout_s=850
    )

    _assert_each_equal(done)


@pytest.mark.long
def test_in_bfloat16_the_gaps_are_reported(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--dtype", "bfloat16", "--transport", "process_group", "--prompts", "4")

    assert done.returncode == 0, done.stderr + done.stdout
    assert "P/D over process_group against transformers: " in done.stdout


def test_a_folder_that_is_no_model_is_one_line(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model / "none"))

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_one_process_serves_the_same_surface(tiny_model: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdserve", "serve", str(tiny_model), "--port", str(port)]
    flags = ["--kv-cache-memory", "16MiB", "--served-model-name", "tiny"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=os.environ.copy()) as server:
        client = client_of(server, port)

        reply = client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        health = client.get("/health")
        server.terminate()
        server.communicate(timeout=300)

        assert reply.status == 200, reply.body
        assert health.status == 200
        assert server.wait(300) == 0
