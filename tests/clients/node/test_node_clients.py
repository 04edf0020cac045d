"""The official clients for Node, unchanged, against the scheduler's port: each script of this folder is a test."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pdserve.readiness import check_ready
from pdserve.run_folder import default_cache_dir
from tests.clients.conftest import PARSERS
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import START_TIMEOUT_S, GuideCluster
from tests.conformance.conftest import serving
from tests.conformance.scripted_model import ANSWER, THINKING, text_of
from tests.conftest import MISSING

pytestmark = [pytest.mark.cluster, pytest.mark.long]

HERE = Path(__file__).parent
SCRIPTS = ("openai_chat", "openai_responses", "anthropic_messages")
EXPECTED = {"answer": text_of(ANSWER), "thinking": text_of(THINKING), "city": "Zürich ☀ or <tool_call>"}
"""What the model writes, for scripts to compare with."""
KEY = "a-key-of-these-tests"
_INSTALL_S, _SCRIPT_S, _POLL_S = 300.0, 600.0, 0.05


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts and the packages of the lock file."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip(f"{MISSING}: node and npm")
    folder = tmp_path_factory.mktemp("node")
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    (folder / "node_modules").symlink_to(installed())
    return folder


def installed() -> Path:
    """Return node_modules of the lock file, which `npm ci` makes once, in pdserve's cache folder."""
    manifest = [HERE / name for name in ("package.json", "package-lock.json", ".npmrc")]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in manifest)).hexdigest()[:16]
    root = default_cache_dir(os.environ) / "node-clients" / name
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():  # another worker may have made it meanwhile
            draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root.parent))
            for path in manifest:
                shutil.copy(path, draft)
            run(["npm", "ci", "--ignore-scripts"], draft, {}, _INSTALL_S)
            draft.replace(root)
    return root / "node_modules"


def run(command: list[str], folder: Path, variables: Mapping[str, str], timeout_s: float = _SCRIPT_S) -> None:
    """Run a command; its failure is the test's, with what it wrote."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]


def variables(url: str, key: str = "none") -> dict[str, str]:
    """Return what a script reads from its environment."""
    return {"PDSERVE_URL": url, "PDSERVE_KEY": key, "PDSERVE_EXPECTED": json.dumps(EXPECTED)}


@pytest.mark.covers("B.clients.1", "B.clients.4", "B.clients.5")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_for_node_works_unchanged(script: str, scripts: Path, pair: str) -> None:
    run(["node", f"{script}.test.mjs"], scripts, variables(pair))


def test_errors_have_the_clients_classes_and_full_queues_are_retried(
    scripts: Path, model: Path, tmp_path: Path
) -> None:
    flags = (*PARSERS, f"--api-key={KEY}", "--max-num-seqs=1", "--max-queued-requests=1")

    with serving(model, tmp_path, flags) as url:
        run(["node", "errors.test.mjs"], scripts, variables(url, KEY))


def test_a_request_is_retried_until_an_instance_lives(scripts: Path, model: Path, tmp_path: Path) -> None:
    with GuideCluster(tmp_path, model, prefill=("4",), decode=("6",), flags=ENGINE_FLAGS) as cluster:
        cluster.start("prefill-0")
        cluster.start("scheduler", flags=PARSERS)
        wait(lambda: check_ready(cluster.client)[1] != "")  # it answers what is missing
        output = tmp_path / "output"
        with output.open("wb") as file:
            script = subprocess.Popen(
                ["node", "retry.mjs"], cwd=scripts, env={**os.environ, **variables(cluster.client.base_url)},
                stdout=file, stderr=file,
            )  # fmt: skip
        try:
            wait(lambda: "503" in output.read_text() or script.poll() is not None)
            cluster.start("decode-0")
            assert script.wait(_SCRIPT_S) == 0, output.read_text()
        finally:
            script.kill()
            script.wait()
    *statuses, answer = output.read_text().splitlines()

    assert (statuses[0], statuses[-1], set(statuses)) == ("503", "200", {"503", "200"})
    assert answer == EXPECTED["answer"].rstrip("\n")


def wait(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(_POLL_S)
