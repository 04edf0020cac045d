"""Where the addresses of NPUs come from."""

from pathlib import Path

import pytest

from ranktable_tools.devices.npu_addresses import npu_addresses
from ranktable_tools.errors import RanktableError
from tests.ranktable_tools import recorded
from tests.ranktable_tools.stub_tools import calls, write_stub

NO_TOOL = {"PATH": "/none"}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "hccn.conf"
    path.write_text(recorded.CONF)
    return path


def _tool(folder: Path, addresses: dict[str, str], flag: str = "ip") -> dict[str, str]:
    answers = {f"-i {device} -{flag} -g": f"ipaddr:{address}\n" for device, address in addresses.items()}
    write_stub(folder, "hccn_tool", answers, other=recorded.NO_DEVICE)
    return {"PATH": str(folder)}


def test_devices_are_queried_one_after_the_other(tmp_path: Path) -> None:
    environ = _tool(tmp_path, {"4": "10.0.0.4", "5": "10.0.0.5"})

    assert npu_addresses(["4", "5"], None, environ) == {"4": "10.0.0.4", "5": "10.0.0.5"}
    assert calls(tmp_path) == ["hccn_tool -i 4 -ip -g", "hccn_tool -i 5 -ip -g"]


def test_an_a3_pod_is_queried_for_virtual_cards(tmp_path: Path) -> None:
    write_stub(tmp_path, "hccn_tool", {"-i 0 -vnic -g": recorded.VNIC, "-i 0 -ip -g": recorded.IP})
    environ = {"PATH": str(tmp_path)}

    assert npu_addresses(["0"], "vnic", environ) == {"0": "192.168.2.199"}
    assert npu_addresses(["0"], "ip", environ) == {"0": "10.0.245.11"}


def test_without_the_tool_the_conf_file_is_read(conf: Path) -> None:
    assert npu_addresses(["1", "0"], None, NO_TOOL, conf=conf) == {"1": "10.20.11.12", "0": "10.20.11.11"}


def test_a_named_conf_file_is_read_even_if_the_tool_exists(tmp_path: Path, conf: Path) -> None:
    environ = _tool(tmp_path, {"0": "10.0.0.4"})

    assert npu_addresses(["0"], "conf", environ, conf=conf) == {"0": "10.20.11.11"}
    assert calls(tmp_path) == []


@pytest.mark.parametrize("answer", [recorded.IP_UNSET, recorded.NO_DEVICE, "ipaddr:\n"])
def test_an_unknown_answer_of_the_tool_is_quoted(tmp_path: Path, answer: str) -> None:
    write_stub(tmp_path, "hccn_tool", {}, other=answer)

    with pytest.raises(RanktableError) as caught:
        npu_addresses(["3"], None, {"PATH": str(tmp_path)})

    words = f"device 3: {tmp_path}/hccn_tool -i 3 -ip -g printed: {answer.strip()}; other sources: --device-ip-from"
    assert str(caught.value).startswith(words)


def test_two_npus_with_one_address_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanktableError, match=r"device 5: device_ip 10\.0\.0\.4 is also that of device 4"):
        npu_addresses(["4", "5"], None, _tool(tmp_path, {"4": "10.0.0.4", "5": "10.0.0.4"}))


def test_two_address_families_are_refused_as_hccl_would(tmp_path: Path) -> None:
    with pytest.raises(RanktableError, match=r"4 has the IPv4 address 10\.0\.0\.4, but device 5 has the IPv6 address"):
        npu_addresses(["4", "5"], None, _tool(tmp_path, {"4": "10.0.0.4", "5": "fd00::5"}))


def test_a_device_that_the_conf_file_lacks_is_named(conf: Path) -> None:
    with pytest.raises(RanktableError, match=r"hccn\.conf has no address_4; devices with an address: 0,1$"):
        npu_addresses(["0", "4"], None, NO_TOOL, conf=conf)


def test_without_tool_and_file_both_are_named(tmp_path: Path) -> None:
    with pytest.raises(RanktableError) as caught:
        npu_addresses(["0"], None, NO_TOOL, conf=tmp_path / "none.conf")

    assert "hccn_tool is not found (set HCCN_TOOL_PATH) and " in str(caught.value)
    assert "none.conf cannot be read: No such file or directory; mount either of them, or" in str(caught.value)


def test_a_source_that_needs_the_tool_names_it() -> None:
    with pytest.raises(RanktableError, match="hccn_tool is not found: set HCCN_TOOL_PATH, or choose --device-ip-from"):
        npu_addresses(["0"], "vnic", NO_TOOL)
