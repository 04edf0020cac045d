"""An instance as the driver sees it, with scripted actors and a fake clock."""

from pathlib import Path

import pytest

from pdserve.process_plan import ProcessPlan
from pdserve.ray_cluster.messages import LaunchRequest, NodeRequest, Placement
from pdserve.ray_cluster.remote_child import ANSWER_S, POLL_EVERY_S, RemoteChild
from ranktable_tools.errors import RanktableError
from tests.ray.scripted import ScriptedHandle, lines, placement
from wire.errors import ConfigError, InstanceLost

PLACE_S = 60.0


class _ScriptedTable:
    """A table that is complete when a test sets it so."""

    def __init__(self) -> None:
        self.placed: list[tuple[str, Placement]] = []
        self.whole = True
        self.text = "t1"
        self.refuses: Exception | None = None

    def set_entry(self, name: str, placement: Placement) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.placed.append((name, placement))

    def launch_request(self, name: str, placement: Placement) -> LaunchRequest | None:
        return LaunchRequest(name, "decode", (), "g", self.text, "l", "", "", "/") if self.whole else None

    def table(self) -> str:
        return self.text


class _Rig:
    def __init__(self, log: Path) -> None:
        self.now = 0.0
        self.handle = ScriptedHandle(place=placement("node-1", "10.0.0.2", 21, "0"))
        self.cluster_table = _ScriptedTable()
        self.log = log
        log.touch()
        plan = ProcessPlan("decode-0", "decode", "", (), {})
        self.child = RemoteChild(plan, self.handle, self.cluster_table, log, place_s=PLACE_S, clock=lambda: self.now)
        self.child.request_placement(NodeRequest("cpu", ("0",), "0"))

    def run(self) -> None:
        """Run until its next `poll` call is pending."""
        for _ in range(10):
            assert self.child.ended() is None
            if "poll" in self.handle.verbs:
                return
        raise AssertionError(f"it does not come to poll: {self.handle.verbs}")

    def request(self) -> str | None:
        """Let the next `poll` call return."""
        self.now += POLL_EVERY_S
        self.child.ended()
        return self.child.ended()


@pytest.fixture
def rig(tmp_path: Path) -> _Rig:
    return _Rig(tmp_path / "decode-0.log")


def test_it_is_placed_started_and_watched_without_waiting(rig: _Rig) -> None:
    assert rig.child.record.address == ""
    rig.run()

    assert rig.handle.verbs == ["place", "start", "poll"]
    assert [name for name, _ in rig.cluster_table.placed] == ["decode-0"]
    record = rig.child.record
    assert (record.name, record.address, record.pid, record.is_here, record.alive) == (
        "decode-0", "10.0.0.2:21", 0, False, False,
    )  # fmt: skip


def test_its_output_is_copied_to_our_log(rig: _Rig) -> None:
    rig.run()
    rig.handle.log = lines("one")
    assert rig.child.ended() is None
    rig.handle.log += lines("two")

    assert rig.request() is None
    assert rig.log.read_text() == "one\ntwo\n"


def test_its_end_is_reported_like_a_local_processs(rig: _Rig) -> None:
    rig.run()
    rig.handle.log, rig.handle.exit_status = lines("loading", "no such model"), 2

    assert rig.request() == f"decode-0 ended with exit status 2: no such model (log: {rig.log})"
    assert rig.child.exit_status == 2
    assert not rig.child.is_lost
    assert rig.handle.verbs[-1] == "poll"  # and makes no more calls
    calls = len(rig.handle.calls)
    rig.request()
    assert len(rig.handle.calls) == calls


def test_a_signal_is_reported_by_name(rig: _Rig) -> None:
    rig.run()
    rig.handle.exit_status = -9

    assert (rig.request() or "").startswith("decode-0 ended with signal SIGKILL: (its log is empty)")


def test_a_lost_node_is_reported_by_its_address(rig: _Rig) -> None:
    rig.run()
    rig.handle.answers["poll"] = InstanceLost("its node has died")

    end = rig.request()

    assert end == f"decode-0 on 10.0.0.2 (node node-1) is lost: its node has died (log: {rig.log})"
    assert rig.child.is_lost
    assert rig.child.exit_status is None


def test_missing_room_is_reported_after_the_deadline(rig: _Rig) -> None:
    rig.handle.answers["place"] = None
    rig.now = PLACE_S

    assert rig.child.ended() is None
    rig.now += 0.1
    assert rig.child.ended() == f"decode-0 is lost: no node had room within 60 s (log: {rig.log})"
    assert rig.child.is_lost


def test_an_actor_that_no_longer_answers_is_lost(rig: _Rig) -> None:
    rig.run()
    rig.handle.answers["poll"] = None
    rig.child.ended()
    rig.handle.answers["start"] = None
    rig.now += POLL_EVERY_S
    rig.child.ended()
    rig.handle.call = _never_answers  # type: ignore[assignment, method-assign]
    rig.child.ended()
    rig.now += POLL_EVERY_S
    rig.child.ended()

    assert rig.child.ended() is None
    rig.now += ANSWER_S + 0.1
    assert "no reply to 'poll' within 30 s" in (rig.child.ended() or "")


def test_it_waits_for_the_other_role_until_the_deadline(rig: _Rig) -> None:
    rig.cluster_table.whole = False
    assert rig.child.ended() is None
    assert rig.child.ended() is None
    assert rig.handle.verbs == ["place"]
    rig.now += PLACE_S + 0.1

    assert "the other role had no instance within 60 s" in (rig.child.ended() or "")


def test_it_starts_once_the_table_is_complete(rig: _Rig) -> None:
    rig.cluster_table.whole = False
    rig.child.ended()
    rig.child.ended()
    rig.cluster_table.whole = True

    rig.run()
    assert rig.handle.verbs == ["place", "start", "poll"]


def test_its_node_gets_each_new_table_once(rig: _Rig) -> None:
    rig.run()
    rig.request()
    rig.cluster_table.text = "t2"
    rig.request()
    rig.request()

    assert [text for text in rig.handle.received_tables() if text is not None] == ["t2"]


@pytest.mark.parametrize("error", [ConfigError("device 0 is taken"), RanktableError("disk is full")])
def test_a_placement_that_cannot_be_entered_ends_only_that_instance(rig: _Rig, error: Exception) -> None:
    rig.cluster_table.refuses = error

    assert f"is lost: {error}" in (rig.child.ended() or "")
    assert rig.child.exit_status == (2 if isinstance(error, ConfigError) else None)


def test_a_full_disk_loses_only_the_log(rig: _Rig) -> None:
    rig.run()
    rig.log.unlink()
    rig.log.mkdir()
    rig.handle.log = lines("said")

    assert rig.request() is None


class _Silent:
    def poll(self) -> str | None:
        return None


def _never_answers(verb: str, text: str) -> _Silent:
    return _Silent()
