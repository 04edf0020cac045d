"""`up --ray` with scripted actors: placement, written files, lost processes and their recovery."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.process_plan import ProcessPlan
from pdserve.processes import Watched
from pdserve.ray_cluster.messages import LaunchRequest, decode
from pdserve.ray_cluster.need import Need
from pdserve.ray_site import RaySite
from pdserve.run_folder import RunFolder
from pdserve.up_options import UpOptions
from pdserve.up_request import UpRequest
from ranktable_tools.errors import RanktableError
from ranktable_tools.table_file import read_global
from tests.ray.scripted import Answer, ScriptedSession, placement
from wire.errors import InstanceLost, Unavailable


def _on_two_nodes(index: int, time: int) -> Answer:
    """Each bundle on its own node; replacements are placed on a third."""
    node = 3 if time else index + 1
    return placement(f"node-{node}", f"10.0.0.{node}", 20 + index, str(index))


class _Rig:
    def __init__(self, folder: Path, placements: Callable[[int, int], Answer], **options: object) -> None:
        self.folder = RunFolder(folder)
        self.printed: list[str] = []
        self.session = ScriptedSession(placements)
        up = UpOptions(ray=True, **options)  # type: ignore[arg-type]
        request = UpRequest(up, EngineOptions(model="/m", port=9000), 0.5, 1.0, ("--model", "/m"))
        self.site = RaySite(request, self.folder, self.printed.append, self.session.join)

    def start(self) -> dict[str, Watched]:
        """Place all instances and start them."""
        self.plans = {plan.name: plan for plan in self.site.plans()}
        return {name: self.site.spawn(plan, False) for name, plan in self.plans.items() if name != "scheduler"}

    @property
    def table(self) -> list[tuple[str, str, int | None]]:
        servers = read_global(str(self.folder.tables / "global_ranktable_10.0.0.9.json")).instances
        return [(one.name, one.server.server_ip, one.server.server_port) for one in servers]


@pytest.fixture
def rig(tmp_path: Path) -> _Rig:
    return _Rig(tmp_path, _on_two_nodes)


def _until(child: Watched, rig: _Rig, index: int, verb: str) -> None:
    while verb not in rig.session.handles[index][-1].verbs:
        assert child.ended() is None


def test_all_instances_are_placed_before_anything_starts(rig: _Rig) -> None:
    rig.start()

    assert rig.session.reserved == (Need("cpu", 1), 2, "spread")
    assert rig.table == [("prefill-0", "10.0.0.1", 20), ("decode-0", "10.0.0.2", 21)]
    assert "decode-0 is placed on 10.0.0.2 (node node-2), CPU 1, port 21" in rig.printed
    assert (rig.folder.tables / "cluster_secret").stat().st_mode & 0o777 == 0o600
    assert rig.session.handles[0][0].verbs == ["place"]


def test_the_scheduler_runs_locally_without_ray_variables(rig: _Rig) -> None:
    rig.start()

    plan = rig.plans["scheduler"]
    assert plan.address == "127.0.0.1:9000"
    assert plan.command[-6:] == ("--host", "127.0.0.1", "--port", "9000", "--model", "/m")
    assert Path(plan.env["GLOBAL_RANK_TABLE_FILE_PATH"]).exists()
    assert Path(plan.env["RANK_TABLE_FILE_PATH"]).exists()


def test_an_instance_gets_its_flags_tables_and_secret(rig: _Rig) -> None:
    child = rig.start()["decode-0"]
    _until(child, rig, 1, "start")

    launch_request = decode(LaunchRequest, dict(rig.session.handles[1][0].calls)["start"])
    assert (launch_request.name, launch_request.role, launch_request.flags, launch_request.folder) == (
        "decode-0",
        "decode",
        ("--model", "/m"),
        os.getcwd(),
    )
    assert launch_request.global_table == (rig.folder.tables / launch_request.global_name).read_text()
    assert '"10.0.0.2"' in launch_request.local_table
    assert launch_request.secret == (rig.folder.tables / "cluster_secret").read_text()


def test_a_process_that_died_is_restarted_by_its_own_actor(rig: _Rig) -> None:
    child = rig.start()["decode-0"]
    _until(child, rig, 1, "poll")
    before = rig.table
    rig.session.handles[1][0].exit_status = -9
    while child.ended() is None:
        pass

    rig.session.handles[1][0].exit_status = None
    again = rig.site.spawn(rig.plans["decode-0"], True)
    while rig.session.handles[1][0].verbs.count("start") == 1:
        assert again.ended() is None

    assert len(rig.session.handles[1]) == 1
    assert rig.table == before


def test_a_lost_instance_starts_elsewhere_and_the_table_is_updated(rig: _Rig) -> None:
    children = rig.start()
    child = children["decode-0"]
    _until(children["prefill-0"], rig, 0, "poll")
    _until(child, rig, 1, "poll")
    rig.session.handles[1][0].answers["poll"] = InstanceLost("its node has died")
    while child.ended() is None:
        pass
    assert rig.table[1] == ("decode-0", "10.0.0.2", 21)

    again = rig.site.spawn(rig.plans["decode-0"], True)
    _until(again, rig, 1, "start")

    assert rig.session.handles[1][0].killed
    assert rig.table == [("prefill-0", "10.0.0.1", 20), ("decode-0", "10.0.0.3", 21)]
    assert again.record.address == "10.0.0.3:21"
    prefill = rig.session.handles[0][0]
    while not any(table is not None and "10.0.0.3" in table for table in prefill.received_tables()):
        assert children["prefill-0"].ended() is None


def test_an_instance_without_room_at_start_is_reported(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, lambda index, time: None if index else _on_two_nodes(index, time))

    with pytest.raises(Unavailable, match=r"decode-0 is lost: no node had room within 0.5 s"):
        rig.site.plans()
    assert not list(rig.folder.tables.glob("global*"))
    rig.site.close(lambda: True)
    assert rig.session.closed


def test_a_table_that_no_process_would_accept_is_refused_at_once(tmp_path: Path) -> None:
    rig = _Rig(
        tmp_path, lambda index, time: placement("n", "127.0.0.1" if index else "10.0.0.1", 20 + index, str(index))
    )

    with pytest.raises(RanktableError, match="write the address at which others reach this host"):
        rig.site.plans()


def test_closing_stops_each_instance_and_leaves_the_cluster(rig: _Rig) -> None:
    rig.start()

    assert rig.site.close(lambda: False) == []
    assert [handles[0].verbs[-1] for handles in rig.session.handles.values()] == ["stop", "stop"]
    assert rig.session.closed


@pytest.mark.parametrize("answer", ["killed", None])
def test_killed_processes_are_named(rig: _Rig, answer: str | None) -> None:
    rig.start()
    rig.session.handles[1][0].answers["stop"] = answer
    polls = itertools.count()

    assert rig.site.close(lambda: next(polls) > 1) == ["decode-0"]
    assert rig.session.closed


def test_an_instance_that_is_gone_at_shutdown_is_not_killed(rig: _Rig) -> None:
    rig.start()
    rig.session.handles[1][0].answers["stop"] = InstanceLost("its node has died")

    assert rig.site.close(lambda: False) == []


def test_closing_before_joining_does_nothing(rig: _Rig) -> None:
    assert list(rig.site.close(lambda: False)) == []
    assert not rig.session.closed


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "starting Ray on this machine, on 127.0.0.1 only"),
        ("127.0.0.1:6379", "joining the Ray cluster at 127.0.0.1:6379"),
        ("10.0.0.18:6379", "can run any program as Ray's user, unless Ray requires a token"),
        ("auto", "can run any program as Ray's user, unless Ray requires a token"),
    ],
)
def test_joining_a_cluster_prints_its_consequences(tmp_path: Path, address: str | None, message: str) -> None:
    rig = _Rig(tmp_path, _on_two_nodes, address=address)

    rig.start()

    assert rig.printed[0].endswith(message) or message in rig.printed[0]
    assert rig.session.joined == (address, 2)


def test_the_previous_runs_log_is_kept(rig: _Rig) -> None:
    rig.folder.log("decode-0").parent.mkdir(parents=True)
    rig.folder.log("decode-0").write_text("before\n")

    rig.start()

    assert rig.folder.log("decode-0").read_text() == ""
    assert rig.folder.log("decode-0").with_name("decode-0.log.1").read_text() == "before\n"


def test_a_remote_instances_plan_is_not_run_locally(rig: _Rig) -> None:
    rig.start()

    assert rig.plans["decode-0"] == ProcessPlan("decode-0", "decode", "", (), {})
