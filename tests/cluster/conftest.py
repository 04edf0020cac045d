"""Models and clusters that tests share."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.guide import GuideCluster
from tests.cluster.pdserve_command import Pdserve
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_tokenizer

ENGINE_FLAGS = ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16")


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder the fake engine and the scheduler's tokenizer can read: no weights. Steps take a millisecond."""
    folder = tmp_path_factory.mktemp("fake-model")
    save_tiny_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fake.json").write_text(json.dumps({"step_seconds": 0.001}))
    return folder


@pytest.fixture(scope="session")
def slow_fake_model(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with steps of 50 ms, so that a long answer is under way for as long as a test needs."""
    folder = tmp_path_factory.mktemp("slow-fake-model")
    for file in fake_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "fake.json").write_text(json.dumps({"step_seconds": 0.05}))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def fake_cluster(tmp_path_factory: pytest.TempPathFactory, fake_model: Path) -> Iterator[GuideCluster]:
    """1P1D on the fake engine, ready, started from one file of flags; one for all tests that leave it unchanged."""
    folder = tmp_path_factory.mktemp("fake-cluster")
    file = folder / "cluster.yaml"
    file.write_text("engine: fake\nmax-num-seqs: 128\nmax-queued-requests: 2000\nuse-v2-block-manager: true\n")
    with GuideCluster(folder, fake_model, flags=("--config", str(file), "--trust-remote-code")) as cluster:
        cluster.start("scheduler")
        cluster.start("prefill-0", flags=("--kv-ip=127.0.0.1",))
        cluster.start("decode-0", flags=("--chat-template=t",))
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def pdserve(tmp_path: Path, fake_model: Path) -> Iterator[Pdserve]:
    """The command with a run folder of its own, which it has left empty at the end."""
    command = Pdserve(tmp_path / "run", fake_model)
    yield command
    assert command("down").returncode == 0
    assert command.folder.read() is None


@pytest.fixture
def slow_cluster(tmp_path: Path, slow_fake_model: Path) -> Iterator[GuideCluster]:
    """1P1D on the slow fake engine, ready."""
    with GuideCluster(tmp_path, slow_fake_model, flags=("--engine=fake",)) as cluster:
        yield cluster.up()
