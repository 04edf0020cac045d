"""Finding and running a driver's tools."""

from pathlib import Path

import pytest

from ranktable_tools.devices.tools import find_tool, run_tool
from ranktable_tools.errors import RanktableError
from tests.ranktable_tools import recorded
from tests.ranktable_tools.stub_tools import write_stub


def test_a_tool_is_found_by_its_variable_before_the_path(tmp_path: Path) -> None:
    write_stub(tmp_path, "hccn_tool", {})
    on_path = {"PATH": str(tmp_path)}

    assert find_tool("hccn_tool", on_path) == str(tmp_path / "hccn_tool")
    assert find_tool("hccn_tool", {**on_path, "HCCN_TOOL_PATH": "/x/hccn_tool"}) == "/x/hccn_tool"
    assert find_tool("no-such-tool", on_path) is None


def test_both_outputs_and_the_status_are_returned(tmp_path: Path) -> None:
    tool = write_stub(tmp_path, "hccn_tool", {}, other=recorded.IP_UNSET)

    answer = run_tool((str(tool), "-i", "4", "-ip", "-g"))

    assert (answer.text, answer.status, answer.summary) == (recorded.IP_UNSET, 13, recorded.IP_UNSET.strip())


def test_missing_output_is_reported_too(tmp_path: Path) -> None:
    assert run_tool((str(write_stub(tmp_path, "hccn_tool", {})),)).summary == "nothing"


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(RanktableError, match=r"/none/hccn_tool -i: cannot be run: No such file or directory"):
        run_tool(("/none/hccn_tool", "-i"))


def test_a_tool_that_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)

    with pytest.raises(RanktableError, match=r"npu-smi info: did not exit within 0\.05 s"):
        run_tool((str(tool), "info"), timeout_s=0.05)
