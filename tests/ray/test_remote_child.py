"""An instance as the driver sees it, with scripted actors and a fake clock."""

from pathlib import Path

import pytest

from pdserve.process_plan import ProcessPlan
from pdserve.ray_cluster.messages import NodeRequest, Orders, Seat
from pdserve.ray_cluster.remote_child import ANSWER_S, NEWS_EVERY_S, RemoteChild
from ranktable_tools.errors import RanktableError
from tests.ray.scripted import ScriptedHandle, lines, seat
from wire.errors import ConfigError, InstanceLost

PLACE_S = 60.0


class _Seating:
    """A table that is complete when a test sets it so."""

    def __init__(self) -> None:
        self.seated: list[tuple[str, Seat]] = []
        self.whole = True
        self.text = "t1"
        self.refuses: Exception | None = None

    def sit(self, name: str, seat: Seat) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.seated.append((name, seat))

    def orders(self, name: str, seat: Seat) -> Orders | None:
        return Orders(name, "decode", (), "g", self.text, "l", "", "", "/") if self.whole else None

    def table(self) -> str:
        return self.text


class _Rig:
    def __init__(self, log: Path) -> None:
        self.now = 0.0
        self.handle = ScriptedHandle(seat=seat("node-1", "10.0.0.2", 21, "0"))
        self.seating = _Seating()
        self.log = log
        log.touch()
        plan = ProcessPlan("decode-0", "decode", "", (), {})
        self.child = RemoteChild(plan, self.handle, self.seating, log, place_s=PLACE_S, clock=lambda: self.now)
        self.child.request_seat(NodeRequest("cpu", ("0",), "0"))

    def run(self) -> None:
        """Run until its next `news` call is pending."""
        while "news" not in self.handle.verbs:
            assert self.child.ended() is None

    def look(self) -> str | None:
        """Let the next `news` call return."""
        self.now += NEWS_EVERY_S
        self.child.ended()
        return self.child.ended()


@pytest.fixture
def rig(tmp_path: Path) -> _Rig:
    return _Rig(tmp_path / "decode-0.log")


def test_it_is_seated_started_and_watched_without_waiting(rig: _Rig) -> None:
    assert rig.child.record.address == ""
    rig.run()

    assert rig.handle.verbs == ["seat", "start", "news"]
    assert [name for name, _ in rig.seating.seated] == ["decode-0"]
    record = rig.child.record
    assert (record.name, record.address, record.pid, record.is_here, record.alive) == (
        "decode-0", "10.0.0.2:21", 0, False, False,
    )  # fmt: skip


def test_its_output_is_copied_to_our_log(rig: _Rig) -> None:
    rig.run()
    rig.handle.log = lines("one")
    assert rig.child.ended() is None
    rig.handle.log += lines("two")

    assert rig.look() is None
    assert rig.log.read_text() == "one\ntwo\n"


def test_its_end_is_reported_like_a_local_processs(rig: _Rig) -> None:
    rig.run()
    rig.handle.log, rig.handle.exit_status = lines("loading", "no such model"), 2

    assert rig.look() == f"decode-0 ended with exit status 2: no such model (log: {rig.log})"
    assert rig.child.exit_status == 2
    assert not rig.child.is_lost
    assert rig.handle.verbs[-1] == "news"  # and makes no more calls
    asked = len(rig.handle.asked)
    rig.look()
    assert len(rig.handle.asked) == asked


def test_a_signal_is_reported_by_name(rig: _Rig) -> None:
    rig.run()
    rig.handle.exit_status = -9

    assert (rig.look() or "").startswith("decode-0 ended with signal SIGKILL: (its log is empty)")


def test_a_lost_node_is_reported_by_its_address(rig: _Rig) -> None:
    rig.run()
    rig.handle.answers["news"] = InstanceLost("its node has died")

    end = rig.look()

    assert end == f"decode-0 on 10.0.0.2 (node node-1) is lost: its node has died (log: {rig.log})"
    assert rig.child.is_lost
    assert rig.child.exit_status is None


def test_missing_room_is_reported_after_the_deadline(rig: _Rig) -> None:
    rig.handle.answers["seat"] = None
    rig.now = PLACE_S

    assert rig.child.ended() is None
    rig.now += 0.1
    assert rig.child.ended() == f"decode-0 is lost: no node had room within 60 s (log: {rig.log})"
    assert rig.child.is_lost


def test_an_actor_that_no_longer_answers_is_lost(rig: _Rig) -> None:
    rig.run()
    rig.handle.answers["news"] = None
    rig.child.ended()
    rig.handle.answers["start"] = None
    rig.now += NEWS_EVERY_S
    rig.child.ended()
    rig.handle.ask = _never_answers  # type: ignore[assignment, method-assign]
    rig.child.ended()
    rig.now += NEWS_EVERY_S
    rig.child.ended()

    assert rig.child.ended() is None
    rig.now += ANSWER_S + 0.1
    assert "no reply to 'news' within 30 s" in (rig.child.ended() or "")


def test_it_waits_for_the_other_role_until_the_deadline(rig: _Rig) -> None:
    rig.seating.whole = False
    assert rig.child.ended() is None
    assert rig.child.ended() is None
    assert rig.handle.verbs == ["seat"]
    rig.now += PLACE_S + 0.1

    assert "the other role had no instance within 60 s" in (rig.child.ended() or "")


def test_it_starts_once_the_table_is_complete(rig: _Rig) -> None:
    rig.seating.whole = False
    rig.child.ended()
    rig.child.ended()
    rig.seating.whole = True

    rig.run()
    assert rig.handle.verbs == ["seat", "start", "news"]


def test_its_node_gets_each_new_table_once(rig: _Rig) -> None:
    rig.run()
    rig.look()
    rig.seating.text = "t2"
    rig.look()
    rig.look()

    assert [text for text in rig.handle.received_tables() if text is not None] == ["t2"]


@pytest.mark.parametrize("error", [ConfigError("device 0 is taken"), RanktableError("disk is full")])
def test_a_seat_that_cannot_be_entered_ends_only_that_instance(rig: _Rig, error: Exception) -> None:
    rig.seating.refuses = error

    assert f"is lost: {error}" in (rig.child.ended() or "")
    assert rig.child.exit_status == (2 if isinstance(error, ConfigError) else None)


def test_a_full_disk_loses_only_the_log(rig: _Rig) -> None:
    rig.run()
    rig.log.unlink()
    rig.log.mkdir()
    rig.handle.log = lines("said")

    assert rig.look() is None


class _Silent:
    def poll(self) -> str | None:
        return None


def _never_answers(verb: str, text: str) -> _Silent:
    return _Silent()
