"""How deploy/docker_run.sh uses the host that it runs on: driver, tools and nodes below a folder stand in for it."""

from pathlib import Path

import pytest

from ranktable_tools.containers.docker_run import _on_host
from ranktable_tools.containers.host_checks import Host, notes_of, require_ready
from ranktable_tools.containers.mounts import Mount
from ranktable_tools.containers.run_line import MANAGERS, SMI, Container, all_mounts, run_line, words_of
from ranktable_tools.errors import RanktableError
from ranktable_tools.tables import Role

FILES = (
    "/etc/localtime",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
    SMI,
    *MANAGERS,
    "/dev/davinci4",
    "/dev/davinci5",
)
FOLDERS = ("/usr/local/Ascend/driver", "/sys/fs/cgroup", "/data")


def _container(role: Role = "prefill", *, guide_exact: bool = False) -> Container:
    ids = () if role == "scheduler" else ("4", "5")
    return Container(role, "npu", ids, "c1", "i", Mount("/data", "/work"), guide_exact=guide_exact)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An NPU host as the guide has it; /var/log/npu does not exist yet."""
    for folder in FOLDERS:
        (tmp_path / folder[1:]).mkdir(parents=True)
    for file in FILES:
        path = tmp_path / file[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def test_a_host_as_the_guide_has_it_is_ready(root: Path) -> None:
    for role in ("prefill", "scheduler"):
        require_ready(_on_host(_container(role), Host(None, root)), Host(None, root))


@pytest.mark.parametrize("gone", ["/usr/local/Ascend/driver", "/etc/ascend_install.info", "/data", "/etc/localtime"])
def test_a_missing_mount_source_is_named(root: Path, gone: str) -> None:
    path = root / gone[1:]
    path.rmdir() if path.is_dir() else path.unlink()

    with pytest.raises(RanktableError, match=f"^{gone}: not on this host, and docker would create empty folders"):
        require_ready(_container(), Host(None, root))


@pytest.mark.parametrize("gone", ["/dev/davinci5", "/dev/devmm_svm"])
def test_a_missing_device_node_is_named(root: Path, gone: str) -> None:
    (root / gone[1:]).unlink()

    with pytest.raises(RanktableError, match=f"^{gone}: not on this host; `npu-smi info` lists its cards"):
        require_ready(_container(), Host(None, root))


def test_the_scheduler_needs_no_host_files(root: Path) -> None:
    for path in (SMI, "/dev/hisi_hdc", "/etc/ascend_install.info"):
        (root / path[1:]).unlink()

    require_ready(_container("scheduler"), Host(None, root))
    with pytest.raises(RanktableError, match=SMI):
        require_ready(_container("scheduler", guide_exact=True), Host(None, root))


def test_npu_smi_is_mounted_from_its_place_on_the_host(root: Path) -> None:
    (root / SMI[1:]).unlink()
    other = root / "usr/local/bin/npu-smi"
    other.parent.mkdir()
    other.touch()

    found = _on_host(_container(), Host(None, root))

    assert Mount("/usr/local/bin/npu-smi", "/usr/local/bin/npu-smi") in all_mounts(found)
    assert SMI not in {mount.source for mount in all_mounts(found)}


def test_a_missing_hccn_conf_is_reported(root: Path) -> None:
    (root / "etc/hccn.conf").unlink()

    found = _on_host(_container(), Host(None, root))

    assert "/etc/hccn.conf" not in " ".join(words_of(run_line(found)))
    assert "there is no /etc/hccn.conf here" in notes_of(found, Host(None, root), share=False, strict=False)[0]


def test_the_guides_exact_line_does_not_depend_on_the_host(root: Path) -> None:
    (root / SMI[1:]).unlink()
    container = _container(guide_exact=True)

    assert _on_host(container, Host(None, root)) == container


def test_a_host_without_a_driver_gets_the_guides_line() -> None:
    """It is printed there for another host, which may have all of it."""
    assert _on_host(_container(), Host(None, Path("/nowhere"))) == _container()
