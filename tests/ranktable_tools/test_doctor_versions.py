"""The doctor's checks of the versions of driver, firmware, CANN and torch_npu."""

from pathlib import Path

import pytest

from ranktable_tools.doctor import versions
from ranktable_tools.doctor.versions import check_versions, find_cann, find_versions, is_older, numbers
from tests.ranktable_tools import recorded
from tests.ranktable_tools.bench import Bench

DRIVER = (
    "Version={version}\nascendhal_version=7.35.23\ncompatible_version_fw=[7.0.0,7.7.99]\npackage_version={version}\n"
)


class Ascend:
    """An NPU machine of given versions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(folder, "davinci0", "davinci1")
        self._monkeypatch = monkeypatch

    def check(
        self, driver: str | None, cann: str | None, torch_npu: str | None, firmware: str = "7.1.0.7.220"
    ) -> tuple[str, str]:
        """Return the result and the message."""
        if driver is not None:
            self.bench.file("/usr/local/Ascend/driver/version.info", DRIVER.format(version=driver))
        if cann is not None:
            info = f"package_name=Ascend-cann-toolkit\nversion={cann}\ninnerversion=V100R001\n"
            self.bench.file("/usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info", info)
        board = recorded.BOARD.replace("7.1.0.7.220", firmware) if driver is not None else ""
        self.bench.tool("npu-smi", {"info": recorded.INFO_A2, "info -t board -i 0": board})
        self._monkeypatch.setattr(versions, "package_version", lambda name: torch_npu)
        verdict = check_versions(self.bench.case())
        return verdict.result, verdict.message


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ascend:
    return Ascend(tmp_path, monkeypatch)


def test_matching_versions_are_reported(ascend: Ascend) -> None:
    assert ascend.check("25.5.0", "9.1.0", "2.10.0.post4") == (
        "ok",
        "driver 25.5.0, firmware 7.1.0.7.220, CANN 9.1.0, torch_npu 2.10.0.post4",
    )


@pytest.mark.parametrize(
    ("driver", "cann", "torch_npu", "words"),
    [
        ("23.0.5", "9.1.0", "2.13.0", "driver 23.0.5 is older than the guide's 23.0.6"),
        ("23.0.rc3", "9.1.0", "2.13.0", "driver 23.0.rc3 is older than the guide's 23.0.6"),
        ("23.0.6", "9.1.0", "2.13.0", "driver 23.0.6 suits the guide, but torch_npu 2.13.0 needs 25.0 or later"),
        ("24.1.rc1", "9.1.0", "2.10.0", "driver 24.1.rc1 suits the guide, but torch_npu 2.10.0 needs 25.0 or later"),
        ("25.0.rc1", "8.5.1", "2.10.0", "CANN 8.5.1 is older than 9.0, which torch_npu 2.10 needs"),
        ("25.0.rc1", "9.0.0", "2.9.0", "torch_npu 2.9.0 is older than 2.10"),
        ("25.0.rc1", "9.0.0", None, "torch_npu is not installed in this Python"),
        ("25.0.rc1", None, "2.10.0", "CANN is not found"),
        (
            None,
            "9.0.0",
            "2.10.0",
            "no driver version in /usr/local/Ascend/driver/version.info or from npu-smi",
        ),
    ],
)
def test_a_version_that_does_not_match_is_a_failure(
    ascend: Ascend, driver: str | None, cann: str | None, torch_npu: str | None, words: str
) -> None:
    assert ascend.check(driver, cann, torch_npu) == ("fail", words)


@pytest.mark.parametrize(
    ("firmware", "fits"), [("7.0.0.1", True), ("7.7.99.4", True), ("6.4.12", False), ("7.8", False)]
)
def test_firmware_has_to_be_in_the_drivers_range(ascend: Ascend, firmware: str, fits: bool) -> None:
    result, words = ascend.check("25.5.0", "9.1.0", "2.10.0", firmware)

    assert (result == "ok") is fits
    assert fits or words == f"firmware {firmware} is not in 7.0.0 to 7.7.99, which driver 25.5.0 supports"


def test_all_mismatches_are_reported_at_once(ascend: Ascend) -> None:
    result, words = ascend.check("23.0.6", "8.0.RC1", "2.1.0")

    assert result == "fail"
    assert words.count("; ") == 2


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        ("/usr/local/Ascend/cann/ascend_toolkit_install.info", "version=9.1.0\ninnerversion=V1\n", "9.1.0"),
        ("/opt/cann/version.cfg", "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.2.RC1]\n", "8.2.RC1"),
        ("/opt/cann/runtime/version.info", "Version=7.6.0.1.220\nversion_dir=8.2.RC1\n", "8.2.RC1"),
        ("/opt/cann/runtime/version.info", "Version=7.6.0.1.220\n", None),
    ],
)
def test_cann_is_found_by_its_own_number_not_by_that_of_its_parts(
    tmp_path: Path, path: str, text: str, version: str | None
) -> None:
    bench = Bench(tmp_path)
    bench.file(path, text)
    environ = {"ASCEND_HOME_PATH": "/opt/cann"} if path.startswith("/opt") else {}

    assert find_cann(bench.machine(environ)) == version


def test_without_a_version_file_npu_smi_gives_the_drivers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "davinci0")
    bench.tool("npu-smi", {"info": recorded.INFO_A2, "info -t board -i 0": recorded.BOARD})

    found = find_versions(bench.machine(), installed=lambda name: None)

    assert (found.driver, found.firmware, found.cann) == ("23.0.5", "7.1.0.7.220", None)


def test_versions_compare_by_number() -> None:
    assert numbers("7.1.0.7.220") == (7, 1, 0, 7, 220)
    assert numbers("8.0.RC1") == (8, 0)
    assert is_older("2.9.0", "2.10")
    assert not is_older("2.10.0.post4", "2.10")
    assert not is_older("25.0.rc1", "25.0")


def test_a_machine_without_npus_has_no_such_versions(tmp_path: Path) -> None:
    assert check_versions(Bench(tmp_path).case()).result == "not here"
