"""One model, served in two ways that must be indistinguishable: by one combined instance, and over P/D."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.processes import POLL_S
from pdserve.readiness import check_ready
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import START_TIMEOUT_S, GuideCluster
from tests.conformance.served import Compared, Oracle, Served
from tests.engine.tiny_models import make_tiny_model

FLAGS = (
    "--max-logprobs",
    "20",
    "--enable-prompt-tokens-details",
    "--enable-tokenizer-info-endpoint",
    "--enable-dev-routes",
    "--hf-overrides",
    '{"is_matryoshka": true}',
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("conformance") / "tiny-llama")


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    """transformers over the same weights."""
    return Oracle(model)


@pytest.fixture(scope="session")
def combined(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `pdserve serve`."""
    with serving(model, tmp_path_factory.mktemp("serve"), FLAGS) as url:
        yield url


@contextlib.contextmanager
def serving(model: Path, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Run `pdserve serve`; yield its URL."""
    (port,) = free_ports(1)
    log = folder / "log"
    command = [sys.executable, "-P", "-m", "pdserve", "serve", str(model), "--port", str(port), *flags, *ENGINE_FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--served-model-name", "tiny"], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        client, deadline = Client(f"http://127.0.0.1:{port}"), time.monotonic() + START_TIMEOUT_S
        while not check_ready(client)[0]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        yield client.base_url
    finally:
        process.terminate()
        assert process.wait(300) == 0, log.read_text()


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a scheduler before one prefill and one decode instance."""
    with serving_pair(model, tmp_path_factory.mktemp("pair"), FLAGS) as url:
        yield url


@contextlib.contextmanager
def serving_pair(model: Path, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Run a prefill instance, a decode instance, and a scheduler with these flags; yield its URL."""
    with GuideCluster(folder, model, prefill=("4",), decode=("6",), flags=ENGINE_FLAGS) as cluster:
        cluster.start(*cluster.names)
        cluster.start("scheduler", flags=flags)
        cluster.wait_ready()
        yield cluster.client.base_url
        cluster.wait_idle()


@pytest.fixture(scope="session")
def answers() -> dict[str, object]:
    """What the first way answered, for the second to be compared with."""
    return {}


@pytest.fixture(params=(pytest.param("combined", marks=pytest.mark.long), "P/D"))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A client of P/D; under `scripts/test --all` of a combined instance too."""
    with _http(request) as http:
        yield Served(http)


@pytest.fixture(params=("combined", "P/D"))
def compared(request: pytest.FixtureRequest, answers: dict[str, object]) -> Iterator[Compared]:
    """A client of one way and then of the other, whose answers must be the same."""
    with _http(request) as http:
        yield Compared(http, request.node.originalname, answers)


def _http(request: pytest.FixtureRequest) -> httpx.Client:
    url = request.getfixturevalue("combined" if request.param == "combined" else "pair")
    return httpx.Client(base_url=url, timeout=300.0, trust_env=False)
