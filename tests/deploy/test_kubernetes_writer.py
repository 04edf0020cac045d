"""The writer and the announcers over a real HTTP server that keeps resourceVersions, conflicts and roles."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ranktable_tools.kube.announcer import Announcer, PartOwner
from ranktable_tools.kube.api import Access, KubeApi, KubeError, access_in_pod
from ranktable_tools.kube.merging import ClusterSize
from ranktable_tools.kube.names import PART_FILE, TABLE_FILE, TABLE_KEY
from ranktable_tools.kube.retry_loop import Stop, repeat
from ranktable_tools.kube.writer import ConfigMapNames, Writer
from tests.deploy.fake_kube import Cluster, access, serving
from tests.deploy.kube_parts import part
from tests.security.certificates import Authority

PLACES = ConfigMapNames("parts", "ranktable", "app=pdserve")


@pytest.fixture
def cluster() -> Cluster:
    """Two empty ConfigMaps and one account."""
    made = Cluster(accounts={"t": "anyone"})
    made.create_config_map("parts")
    made.create_config_map("ranktable")
    return made


@pytest.fixture
def api(cluster: Cluster, tmp_path: Path) -> Iterator[KubeApi]:
    with serving(cluster) as url:
        yield KubeApi(access(url, tmp_path, "t"), timeout_s=10.0)


def _member(api: KubeApi, folder: Path, name: str, text: str) -> Announcer:
    (folder / name).mkdir()
    (folder / name / PART_FILE).write_text(text)
    return Announcer(api, PartOwner(name, folder / name, "parts", "ranktable"))


def _announce_three(cluster: Cluster, api: KubeApi, folder: Path) -> list[Announcer]:
    cluster.run_pod("s", "10.0.0.8")
    cluster.run_pod("p-0", "10.0.0.1")
    cluster.run_pod("d-0", "10.0.0.2")
    texts = {"s": part("scheduler", "10.0.0.9"), "p-0": part("prefill", "10.0.0.1"), "d-0": part("decode", "10.0.0.2")}
    return [_member(api, folder, name, text) for name, text in texts.items()]


def test_the_table_is_initializing_then_completed_then_live(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    writer, members = Writer(api, PLACES, ClusterSize(1, 1)), _announce_three(cluster, api, tmp_path)
    messages = [writer.turn()]
    for member in members[:2]:
        member.turn()
    messages.append(writer.turn())
    waiting = json.loads((tmp_path / "s" / TABLE_FILE).read_text())
    members[2].turn()
    messages.append(writer.turn())
    for member in members:
        member.turn()

    assert waiting == {"version": "1.0", "status": "initializing"}
    assert messages[0][-1] == "wrote ConfigMap ranktable: initializing"
    assert messages[1] == ["waiting: 0 of 1 decode instances"]
    assert messages[2] == ["wrote ConfigMap ranktable: completed: prefill-0 10.0.0.1, decode-0 10.0.0.2"]
    for name in ("s", "p-0", "d-0"):
        assert (tmp_path / name / TABLE_FILE).read_text() == cluster.data("ranktable")[TABLE_KEY]

    cluster.run_pod("d-1", "10.0.0.3")
    _member(api, tmp_path, "d-1", part("decode", "10.0.0.3")).turn()
    assert writer.turn()[-1].endswith("completed: prefill-0 10.0.0.1, decode-0 10.0.0.2, decode-1 10.0.0.3")
    cluster.run_pod("d-0", "10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z")
    assert writer.turn()[-1].endswith("completed: prefill-0 10.0.0.1, decode-0 10.0.0.3")


def test_nothing_is_written_if_nothing_changed(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    writer = Writer(api, PLACES, ClusterSize(1, 1))
    for member in _announce_three(cluster, api, tmp_path):
        member.turn()
        member.turn()
    writer.turn()
    before = cluster.version

    writer.turn()

    assert cluster.version == before
    assert [call for call in cluster.calls if call[0] == "PUT"] == [("PUT", "configmaps/ranktable", 200)]


def test_pods_that_write_at_the_same_time_lose_no_part(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    members = [_member(api, tmp_path, f"p-{n}", part("prefill", f"10.0.0.{n + 1}")) for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Announcer.turn, members))

    assert len(cluster.data("parts")) == 16


def test_a_concurrent_write_is_read_again_and_not_overwritten(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    writer, members = Writer(api, PLACES, ClusterSize(1, 1)), _announce_three(cluster, api, tmp_path)
    for member in members:
        member.turn()
    once = threading.Event()

    def meddle() -> None:
        if not once.is_set():
            once.set()
            api.set_keys("ranktable", {"note": "an operator's"})

    cluster.before_put = meddle
    writer.turn()

    assert [status for method, _, status in cluster.calls if method == "PUT"] == [409, 200]
    assert cluster.data("ranktable")["note"] == "an operator's"
    assert '"completed"' in cluster.data("ranktable")[TABLE_KEY]


def test_a_writer_that_always_conflicts_reports_it(cluster: Cluster, api: KubeApi) -> None:
    numbers = iter(range(100))
    cluster.before_put = lambda: api.set_keys("ranktable", {"note": str(next(numbers))})

    with pytest.raises(KubeError, match="ConfigMap ranktable: written by others 5 times in a row"):
        Writer(api, PLACES, ClusterSize(1, 1)).turn()


def test_two_writers_write_one_table(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    for member in _announce_three(cluster, api, tmp_path):
        member.turn()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Writer.turn, [Writer(api, PLACES, ClusterSize(1, 1)) for _ in range(2)]))

    assert len([call for call in cluster.calls if call[0] == "PUT" and call[2] == 200]) == 1


def test_a_member_that_ends_removes_its_part(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    members = _announce_three(cluster, api, tmp_path)
    for member in members:
        member.turn()

    members[1].leave()

    assert set(cluster.data("parts")) == {"s", "d-0"}


def test_a_part_is_resent_after_a_minute_and_when_it_changes(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    now = 0.0
    (tmp_path / PART_FILE).write_text("one")
    announcer = Announcer(api, PartOwner("p-0", tmp_path, "parts", "ranktable"), clock=lambda: now)
    announcer.turn()
    cluster.create_config_map("parts")
    announcer.turn()
    assert cluster.data("parts") == {}
    now = 60.0
    announcer.turn()
    assert cluster.data("parts") == {"p-0": "one"}
    (tmp_path / PART_FILE).write_text("two")

    assert announcer.turn() == ["sent the part of p-0"]
    assert cluster.data("parts") == {"p-0": "two"}


def test_the_table_comes_before_the_part_is_made(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    cluster.create_config_map("ranktable", {TABLE_KEY: "{}"})

    assert Announcer(api, PartOwner("p-0", tmp_path, "parts", "ranktable")).turn() == [f"wrote {tmp_path / TABLE_FILE}"]
    assert (tmp_path / TABLE_FILE).stat().st_mode & 0o777 == 0o600
    assert cluster.data("parts") == {}


@pytest.mark.parametrize(("name", "words"), [
    ("no such", "GET /api/v1/namespaces/models/configmaps/no%20such: status 404: configmaps"),
])  # fmt: skip
def test_the_servers_refusal_is_quoted(api: KubeApi, name: str, words: str) -> None:
    with pytest.raises(KubeError, match=words):
        api.config_map(name)


def test_a_missing_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KubeError, match=r"http://127\.0\.0\.1:1 does not respond: .*refused"):
        KubeApi(access("http://127.0.0.1:1", tmp_path, "t")).config_map("x")


def test_a_failed_round_is_logged_once_and_retried(tmp_path: Path) -> None:
    stop, messages, turns = Stop(), list[str](), iter([0, 0, 0, 1, 1, 1])

    def turn() -> list[str]:
        match next(turns, None):
            case None:
                stop.set()
                return []
            case 0:
                raise KubeError("status 503")
            case _:
                return ["waiting"]

    repeat(turn, stop, 0.0, messages.append)

    assert messages == ["trying again: status 503", "waiting"]


def test_https_is_checked_against_the_clusters_authority(cluster: Cluster, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    with serving(cluster, ours.sign("server")) as url:
        known = KubeApi(access(url, tmp_path, "t", str(ours.cert)))
        unknown = KubeApi(access(url, tmp_path, "t", str(theirs.cert)))

        assert known.config_map("parts").data == {}
        with pytest.raises(KubeError, match="CERTIFICATE_VERIFY_FAILED"):
            unknown.config_map("parts")


def test_proxy_variables_are_not_for_the_api_server(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert api.config_map("parts").data == {}


def test_a_renewed_token_is_used(cluster: Cluster, tmp_path: Path) -> None:
    with serving(cluster) as url:
        found = access(url, tmp_path, "t")
        api = KubeApi(found)
        found.token_file.write_text("renewed")
        cluster.accounts = {"renewed": "anyone"}

        assert api.config_map("parts").data == {}


def test_a_pod_finds_its_api_server(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("models")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}

    assert access_in_pod(environ, tmp_path) == Access(
        "https://[fd00::1]:6443", "models", tmp_path / "token", tmp_path / "ca.crt"
    )
    with pytest.raises(KubeError, match="KUBERNETES_SERVICE_HOST is not set"):
        access_in_pod({}, tmp_path)
    with pytest.raises(KubeError, match="namespace: cannot be read: No such file"):
        access_in_pod(environ, tmp_path / "none")


def test_pods_are_selected_by_label_address_and_phase(cluster: Cluster, api: KubeApi) -> None:
    cluster.run_pod("a", "10.0.0.1")
    cluster.run_pod("b", None)
    cluster.run_pod("c", "10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z")
    cluster.run_pod("stranger", "10.0.0.4", {"app": "other"})
    cluster.run_pod("f", "10.0.0.5")
    cluster.pods["f"]["status"]["phase"] = "Failed"

    found = {pod.name: (pod.addresses[:1], pod.leaving) for pod in api.pods("app=pdserve")}

    assert found == {
        "a": (("10.0.0.1",), False), "b": ((), False), "c": (("10.0.0.3",), True), "f": (("10.0.0.5",), True),
    }  # fmt: skip
