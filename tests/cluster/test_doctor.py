"""`ranktable doctor` on a real cluster: ports, scheduler, model and links, and mismatches."""

import json
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools.cli import main
from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(fake_cluster: GuideCluster) -> GuideCluster:
    return fake_cluster


@pytest.fixture
def ask(cluster: GuideCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the doctor with a modified environment of the prefill instance; return its status and findings."""

    def run(**changes: str) -> tuple[int, dict[str, Any]]:
        for name, value in {**cluster.environment("prefill-0"), **changes}.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = main(["doctor", "--format", "json", "--mib", "1", "--url", cluster.client.base_url])
        reported = json.loads(capsys.readouterr().out)
        return status, {finding["name"]: finding for finding in reported["findings"]}

    return run


def test_a_running_cluster_is_reported_completely(cluster: GuideCluster, ask: Any) -> None:
    status, found = ask()

    first, second = cluster.ports
    assert found["ports"]["words"] == f"{first} answers, {second} answers"
    assert found["scheduler"]["words"] == f"{cluster.client.base_url} is ready"
    assert found["model"]["result"] == "ok"
    assert found["model"]["words"].startswith("2 instances with ")
    assert found["links"]["result"] == "ok"
    assert found["links"]["words"].startswith("prefill-0 to decode-0 shm ")
    assert status == 0


def test_ports_in_another_order_are_found_by_querying_the_instances(cluster: GuideCluster, ask: Any) -> None:
    status, found = ask(NODE_PORTS=",".join(map(str, reversed(cluster.ports))))

    assert status == 1
    assert "NODE_PORTS not in the table's order?" in found["model"]["words"]


def test_a_different_secret_is_found_and_not_shown(cluster: GuideCluster, ask: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5ec12e7" * 8)
    secret.chmod(0o600)

    status, found = ask(PDSERVE_SECRET_FILE=str(secret))

    assert status == 1
    assert found["model"]["result"] == "fail"
    assert "5ec12e7" not in json.dumps(found)
