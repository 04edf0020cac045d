"""The doctor in a container, against the guide's `docker run` line."""

from pathlib import Path

import pytest

from ranktable_tools.doctor.case import DoctorTables
from ranktable_tools.doctor.container import check_container
from tests.ranktable_tools.bench import HERE, Bench, server, tables

MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
PREFILL, DECODE = server(HERE, "4,5"), server(HERE, "6,7")


def _container(folder: Path, *cards: str) -> Bench:
    """Return the guide's container with these cards, everything mounted."""
    bench = Bench(folder, *(f"davinci{card}" for card in cards), *MANAGERS)
    bench.file("/.dockerenv", "")
    bench.file("/usr/local/Ascend/driver/version.info", "Version=25.5.0\n")
    bench.file("/usr/local/sbin/npu-smi", "")
    bench.file("/etc/hccn.conf", "address_4=10.0.0.4\n")
    bench.file("/etc/passwd", "root:x:0:0::/root:/bin/sh\nma-user:x:1000:1000::/home/ma-user:/bin/bash\n")
    return bench


def _local(own: object = PREFILL) -> DoctorTables:
    return tables([PREFILL], [DECODE], local=own)  # type: ignore[arg-type]


def test_the_guides_container_is_ok(tmp_path: Path) -> None:
    verdict = check_container(_container(tmp_path, "4", "5").case(_local()), uid=1000)

    assert (verdict.result, verdict.message) == ("ok", "driver and npu-smi are mounted, cards 4,5")


@pytest.mark.parametrize(
    ("path", "result", "words"),
    [
        ("usr/local/sbin/npu-smi", "fail", "npu-smi is not mounted"),
        ("dev/hisi_hdc", "fail", "/dev/hisi_hdc is not there"),
        ("etc/hccn.conf", "warn", "/etc/hccn.conf is not mounted: links over RoCE cannot find their addresses"),
    ],
)
def test_missing_mounts_are_named_with_their_flag(tmp_path: Path, path: str, result: str, words: str) -> None:
    bench = _container(tmp_path, "4", "5")
    (bench.root / path).unlink()

    verdict = check_container(bench.case(_local()), uid=1000)

    assert (verdict.result, verdict.message) == (result, words)
    assert f"/{path}" in verdict.next_step


def test_a_driver_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    bench = _container(tmp_path, "4", "5")
    (bench.root / "usr/local/Ascend/driver/version.info").unlink()
    (bench.root / "usr/local/Ascend/driver").rmdir()

    verdict = check_container(bench.case(_local()), uid=1000)

    assert (verdict.result, verdict.message) == ("fail", "/usr/local/Ascend/driver is not mounted")
    assert verdict.next_step == "docker run -v /usr/local/Ascend/driver:/usr/local/Ascend/driver"


@pytest.mark.parametrize(
    ("cards", "result"), [(("4",), "fail"), (("4", "5", "6", "7"), "fail"), (("0", "1"), "warn"), (("5", "4"), "ok")]
)
def test_its_cards_are_compared_with_the_local_table(tmp_path: Path, cards: tuple[str, ...], result: str) -> None:
    verdict = check_container(_container(tmp_path, *cards).case(_local()), uid=1000)

    assert verdict.result == result
    if result != "ok":
        shown = ",".join(cards)
        assert verdict.message == f"the container has the cards {shown}, but its local table has 4,5"
        assert verdict.next_step == "docker run --device=/dev/davinci4 --device=/dev/davinci5"


def test_the_schedulers_container_needs_no_card(tmp_path: Path) -> None:
    verdict = check_container(_container(tmp_path, "4").case(_local(server(HERE))), uid=1000)

    assert (verdict.result, verdict.message) == ("warn", "the scheduler's container has the cards 4")


@pytest.mark.parametrize(
    ("uid", "result", "words"),
    [
        (0, "ok", ""),
        (1001, "fail", "uid 1001 has no entry in /etc/passwd: HCCL fails with more than one rank (error 19)"),
    ],
)
def test_its_user_has_to_be_known(tmp_path: Path, uid: int, result: str, words: str) -> None:
    verdict = check_container(_container(tmp_path, "4", "5").case(_local()), uid=uid)

    assert verdict.result == result
    assert words in verdict.message


def test_a_user_without_access_to_the_cards_is_a_warning(tmp_path: Path) -> None:
    bench = _container(tmp_path, "4", "5")
    bench.file("/etc/passwd", "other:x:1001:1001::/home/other:/bin/sh\n")

    verdict = check_container(bench.case(_local()), uid=1001)

    assert (verdict.result, verdict.message) == ("warn", "uid 1001 may not open the cards, which belong to uid 1000")


def test_without_container_or_npus_no_mounts_are_checked(tmp_path: Path) -> None:
    plain = Bench(tmp_path / "a", "davinci0")
    without = Bench(tmp_path / "b")
    without.file("/proc/1/cgroup", "0::/kubepods/burstable/pod1\n")

    assert check_container(plain.case()).message == "this is not a container"
    assert check_container(without.case()).message == "a container without NPUs"
    assert check_container(without.case(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})).result == "ok"
