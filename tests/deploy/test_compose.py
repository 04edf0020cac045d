"""deploy/compose.yaml: it is consistent, and its own commands, run as processes, serve 1P1D on the CPU."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoints.default_model import MODEL_NAME, default_model_path
from native.cache import exists_and_is_own, library_folder
from pdserve.ports import free_ports
from tests.cluster.guide import GuideCluster, Process, Tables
from tests.deploy.compose_file import FILE, read
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_tokenizer

CLONE = Path(__file__).resolve().parent.parent.parent
ENTRYPOINT = CLONE / "deploy" / "docker" / "entrypoint.sh"
PARTS = ("prefill", "decode", "scheduler")
# Of the compose specification, what the file may use: any other key is a typo.
SERVICE_KEYS = {
    "image", "build", "init", "cap_drop", "security_opt", "volumes", "network_mode", "restart", "stop_grace_period",
    "depends_on", "command", "ports", "environment", "healthcheck",
}  # fmt: skip


def _fake_model(folder: Path) -> Path:
    """A folder that the fake engine and the scheduler's tokenizer can read: no weights."""
    save_tiny_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fake.json").write_text(json.dumps({"step_seconds": 0.001}))
    return folder


@pytest.fixture
def services() -> dict[str, Any]:
    """The services as they are without any variable set."""
    found: dict[str, Any] = read({})["services"]
    return found


def test_every_key_is_known_to_compose(services: dict[str, Any]) -> None:
    document = read({})

    assert {key for key in document if not key.startswith("x-")} == {"name", "services", "volumes"}
    assert set(services) == {"network", "prepare", *PARTS}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name


def test_everything_a_service_names_exists(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert set(service.get("depends_on", [])) <= set(services), name
        for mount in service["volumes"]:
            assert mount.split(":")[0] in read({})["volumes"], name
            assert not mount.split(":")[1].startswith("/home"), name
        assert (FILE.parent / service["build"]["context"]).resolve() == CLONE, name
        assert (CLONE / service["build"]["dockerfile"]).is_file(), name


def test_services_share_one_network_and_wait_for_their_tables(services: dict[str, Any]) -> None:
    for name in PARTS:
        assert services[name]["network_mode"] == "service:network"
        assert services[name]["depends_on"]["prepare"] == {"condition": "service_completed_successfully"}
        assert services[name]["healthcheck"]["test"][0] == "CMD"
    assert [name for name, service in services.items() if "ports" in service] == ["network"]


def test_the_scheduler_is_on_loopback_by_default(services: dict[str, Any]) -> None:
    assert services["network"]["ports"] == ["127.0.0.1:9000:9000"]
    assert read({"PDSERVE_BIND": "0.0.0.0", "PDSERVE_PORT": "80"})["services"]["network"]["ports"] == [
        "0.0.0.0:80:9000"
    ]


def test_a_users_own_model_is_mounted_and_named() -> None:
    environ = {"MODEL_DIR": "/data/qwen", "PDSERVE_MODEL": "/models", "SERVED_MODEL_NAME": "qwen"}

    for name in PARTS:
        service = read(environ)["services"][name]
        assert "/data/qwen:/models:ro" in service["volumes"]
        assert {"--model=/models", "--served-model-name=qwen"} <= set(service["command"])


def test_the_default_model_is_where_prepare_makes_it(services: dict[str, Any]) -> None:
    cache = Path(services["prepare"]["environment"]["PDSERVE_CACHE_DIR"])

    for name in PARTS:
        assert services[name]["environment"]["PDSERVE_CACHE_DIR"] == str(cache)
        assert f"--model={default_model_path(cache)}" in services[name]["command"]
        assert f"--served-model-name={MODEL_NAME}" in services[name]["command"]


def test_health_checks_use_the_processs_own_port(services: dict[str, Any]) -> None:
    checked = {name: re.search(r":([0-9]+)/(\w+)", services[name]["healthcheck"]["test"][-1]) for name in PARTS}

    for name, match in checked.items():
        assert match is not None
        flag, path = ("--port", "ready") if name == "scheduler" else ("--http-port", "health")
        assert (f"{flag}={match[1]}" in services[name]["command"], match[2]) == (True, path)


def test_a_variable_without_a_default_is_found() -> None:
    with pytest.raises(ValueError, match="without a default"):
        read({}, "services: {a: {image: '$IMAGE'}}")


class _Container(Process):
    """A process of a service, started as its image's entrypoint."""

    def __init__(self, log: Path, service: Mapping[str, Any], flags: Sequence[str]) -> None:
        self._log = log
        variables = {name: value for name, value in service["environment"].items() if name != "PDSERVE_CACHE_DIR"}
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [str(ENTRYPOINT), *service["command"], *flags], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=_environment(variables),  # this machine's own cache: nothing is compiled
                start_new_session=True, cwd=log.parent,
            )  # fmt: skip


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a container's environment: its image's programs come first in PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PDSERVE_PYTHON": sys.executable, **variables}


class ComposeProcesses(GuideCluster):
    """The services as processes of this machine, below a folder, on free ports."""

    def __init__(self, folder: Path, model: Path, ports: tuple[int, ...]) -> None:
        text = FILE.read_text().replace("/work/state", str(folder / "state"))
        numbers = ("8088", "8089", "8188", "8189", "9000")
        for number, port in zip(numbers, ports, strict=True):
            text = re.sub(rf"(?<!-){number}(?=\D)", str(port), text)
        self.services = read({"PDSERVE_MODEL": str(model), "SERVED_MODEL_NAME": "tiny"}, text)["services"]
        super().__init__(folder, model, tables=Tables(folder / "state" / "tables", ()))
        self.port = ports[-1]
        self.client = type(self.client)(f"http://127.0.0.1:{self.port}", timeout_s=60.0)

    def run(self, *words: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run words as a container would."""
        command, env = [str(ENTRYPOINT), *words], _environment(environ)
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)

    def begin(self, flags: Sequence[str]) -> None:
        """Run `prepare`, then start the parts."""
        prepare = self.services["prepare"]
        done = self.run(*prepare["command"], environ=prepare["environment"] | {"HOME": str(self.folder)})
        assert done.returncode == 0, done.stderr
        for name in PARTS:
            service = self.services[name]
            self.processes[name] = _Container(self.folder / f"{name}.log", service, flags)
        self.wait_ready()


def test_libraries_of_the_image_are_found_and_owned_by_its_user(tmp_path: Path) -> None:
    compiled = tmp_path / "home" / ".cache" / "pdserve" / "native"
    compiled.mkdir(parents=True, mode=0o700)
    (compiled / "move-1-2.so").write_bytes(b"of this image")
    cluster = ComposeProcesses(tmp_path, tmp_path / "model", free_ports(5))
    prepare, variables = cluster.services["prepare"], cluster.services["decode"]["environment"]

    for _ in range(2):  # `up` runs it each time
        done = cluster.run(*prepare["command"], environ=prepare["environment"] | {"HOME": str(tmp_path / "home")})
        assert done.returncode == 0, done.stderr

    folder = library_folder(variables)
    assert exists_and_is_own(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"move-1-2.so": b"of this image"}


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("engine", ["fake", "torch"])
def test_its_commands_serve_a_prefill_and_a_decode_instance(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = _fake_model(folder) if engine == "fake" else make_tiny_model("llama", folder)
    flags = (
        ("--engine=fake",) if engine == "fake" else ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16")
    )
    cluster = ComposeProcesses(tmp_path, model, free_ports(5))

    with cluster:
        cluster.begin(flags)
        reply = cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        for name in PARTS:
            check = cluster.services[name]["healthcheck"]["test"][1:]
            assert cluster.run(*check, environ={}).returncode == 0, name

    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["completion_tokens"] == 4
