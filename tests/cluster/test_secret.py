"""The cluster secret between real processes, started as the guide does: found beside the table, different, absent."""

import re
import time
from pathlib import Path

import pytest

from ranktable_tools.secret import ensure_secret
from ranktable_tools.table_file import read_global
from security.secret import Secret
from tests.cluster.guide import GuideCluster, Process
from tests.security.certificates import Authority

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def fingerprint(path: Path) -> str:
    return Secret(path.read_text().strip().encode()).fingerprint


def wait_log(process: Process, words: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while words not in process.log:
        assert time.monotonic() < deadline, f"never said: {words}\n{process.log}"
        time.sleep(0.02)


def cluster(folder: Path, model: Path, *flags: str) -> GuideCluster:
    return GuideCluster(folder, model, flags=("--engine=fake", *flags))


@pytest.mark.long
def test_a_process_with_another_secret_is_named(tmp_path: Path, fake_model: Path) -> None:
    default, _ = ensure_secret(tmp_path)
    other, _ = ensure_secret(tmp_path / "other")
    with cluster(tmp_path, fake_model) as one:
        one.up()
        reply = one.client.post("/v1/completions", ASK)
        assert reply.status == 200, reply.body
        for process in one.processes.values():
            assert "no_cluster_secret" not in process.log
            assert default.read_text().strip() not in process.log

        one.kill("decode-0")
        one.start("decode-0", env={"PDSERVE_SECRET_FILE": str(other)})
        words = f"cluster secrets differ: {fingerprint(default)} here"
        wait_log(one.processes["scheduler"], words)
        wait_log(one.processes["decode-0"], f"cluster secrets differ: {fingerprint(other)} here")
        line = next(line for line in one.processes["scheduler"].log.splitlines() if words in line)
        assert f"{fingerprint(other)} there" in line


@pytest.mark.long
def test_unequal_secrets_end_a_starting_scheduler_naming_both(tmp_path: Path, fake_model: Path) -> None:
    default, _ = ensure_secret(tmp_path)
    other, _ = ensure_secret(tmp_path / "other")
    with cluster(tmp_path, fake_model) as one:
        one.start("prefill-0", "decode-0")
        scheduler = one.start("scheduler", env={"PDSERVE_SECRET_FILE": str(other)})

        assert scheduler.wait() == 2
        last = scheduler.log.splitlines()[-1]
        differ = rf"cluster secrets differ: {fingerprint(other)} here \(\S+\), {fingerprint(default)} there \(\S+ at "
        assert re.search(differ, last), last
        # It ends at the first instance that answers; that one has logged it before.
        assert any(f"{fingerprint(default)} here" in one.processes[name].log for name in one.names)
        one.processes.pop("scheduler")


@pytest.mark.long
def test_without_a_secret_the_guides_lines_give_one_warning(tmp_path: Path, fake_model: Path) -> None:
    with cluster(tmp_path, fake_model) as one:
        one.up()

        assert one.client.post("/v1/completions", ASK).status == 200
        logs = {name: process.log for name, process in one.processes.items()}
        warnings = {name: log.count("WARNING pdserve.trust no_cluster_secret") for name, log in logs.items()}
        assert warnings == dict.fromkeys(logs, 0) | {"scheduler": 1}, logs


def test_a_secret_others_can_read_stops_the_start_with_its_mode(tmp_path: Path, fake_model: Path) -> None:
    default, _ = ensure_secret(tmp_path)
    default.chmod(0o644)
    with cluster(tmp_path, fake_model) as one:
        process = one.start("prefill-0")

        assert process.wait() == 2
        assert f"{default} has mode 0644, but others must have no access: chmod 600" in process.log
        one.processes.clear()


@pytest.mark.long
def test_a_cluster_over_mutual_tls_serves(tmp_path: Path, fake_model: Path) -> None:
    ensure_secret(tmp_path)
    files = Authority(tmp_path / "ca").sign("all", host=_host(tmp_path, fake_model))
    flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
    with cluster(tmp_path, fake_model, *flags) as one:
        one.up()

        assert one.client.post("/v1/completions", ASK).status == 200


def _host(folder: Path, model: Path) -> str:
    """Return this machine's address in the tables."""
    (folder / "probe").mkdir()
    return read_global(str(cluster(folder / "probe", model).tables.global_path)).scheduler.server_ip
