"""How `up` handles a process that ends before the cluster is ready, and another cluster on its port."""

import json
import os
import sys
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.layout import ProcessPlan
from pdserve.processes import Child
from pdserve.readiness import wait_ready
from pdserve.run_folder import ProcessRecord
from telemetry.start_marks import Mark
from tests.pdserve.quiet_server import QuietHandler, serving
from wire.errors import ConfigError, PdserveError, Unavailable


@pytest.mark.parametrize(("status", "error"), [(2, ConfigError), (1, Unavailable), (0, Unavailable)])
def test_a_usage_error_of_a_process_is_reported_as_the_users(
    status: int, error: type[PdserveError], tmp_path: Path
) -> None:
    code = f"import sys; print('its last words'); sys.exit({status})"
    child = Child(
        ProcessPlan("prefill-0", "prefill", "127.0.0.1:1", (sys.executable, "-c", code), {}),
        tmp_path / "log",
        os.environ,
    )

    with pytest.raises(error, match=f"prefill-0 ended with exit status {status}: its last words") as caught:
        wait_ready([child], [Client("http://127.0.0.1:1")], 30.0, print)

    assert type(caught.value) is error


class _Scripted:
    """A child that is alive for the first `looks` polls. Implements Watched."""

    exit_status = 2

    def __init__(self, name: str, address: str, looks: int = 1000, marks: tuple[str, ...] = ()) -> None:
        self.record = ProcessRecord(name, name.partition("-")[0], 0, 0, address, "/log")
        self._looks = looks
        self.marks = {one: Mark(one, 1.0, 0.5) for one in marks}

    def ended(self) -> str | None:
        self._looks -= 1
        return f"{self.record.name} ended: its port is in use" if self._looks < 0 else None


def _ready_handler(address: str) -> type[QuietHandler]:
    body = {"ready": True, "missing": [], "instances": [{"name": "prefill-0", "address": address}]}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps(body).encode())

    return Handler


def _not_ready(missing: str) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(503, json.dumps({"ready": False, "missing": [missing]}).encode())

    return Handler


def test_a_cluster_that_took_the_port_is_not_mistaken_for_ours() -> None:
    messages: list[str] = []
    ours = [_Scripted("prefill-0", "127.0.0.1:8089"), _Scripted("scheduler", "127.0.0.1:9000", looks=3)]

    with (
        serving(_ready_handler("127.0.0.1:8088")) as url,
        pytest.raises(ConfigError, match="scheduler ended: its port is in"),
    ):
        wait_ready(ours, [Client(url)], 60.0, messages.append)

    assert messages == ["starting prefill-0, scheduler", f"waiting: another cluster serves at {url}"]


@pytest.mark.parametrize(("ours", "named"), [("127.0.0.1:8088", "127.0.0.1:8088"), ("fd00::1:8088", "[fd00::1]:8088")])
def test_our_own_cluster_is_recognised_by_its_instances_addresses(ours: str, named: str) -> None:
    messages: list[str] = []
    children = [_Scripted("prefill-0", ours), _Scripted("scheduler", "127.0.0.1:9000")]

    with serving(_ready_handler(named)) as url:
        wait_ready(children, [Client(url)], 60.0, messages.append)

    assert messages == ["starting prefill-0, scheduler"]


def test_captures_are_reported_once_per_instance() -> None:
    messages: list[str] = []
    address = "127.0.0.1:8088"
    children = [_Scripted("prefill-0", address, marks=("weights", "graphs")), _Scripted("decode-0", address, 3)]

    with serving(_not_ready("1 decode instance")) as url, pytest.raises(ConfigError, match="decode-0 ended"):
        wait_ready(children, [Client(url)], 60.0, messages.append)

    assert messages == [
        "starting prefill-0, decode-0", "prefill-0 is capturing the graphs of its decode steps",
        "waiting: 1 decode instance",
    ]  # fmt: skip
