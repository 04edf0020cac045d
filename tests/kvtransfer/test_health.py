"""The state of the transports towards one peer, on the test's own clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.health import LONGEST_REST_S, Change, Health

NAMES = ("shm", "process_group", "tcp")


def test_good_transports_are_tried_best_first() -> None:
    assert Health(NAMES).order() == NAMES


def test_a_failed_transport_comes_last_and_the_others_are_unaffected() -> None:
    health = Health(NAMES)

    health.failed("shm", "reset", 100.0)

    assert health.order() == ("process_group", "tcp", "shm")
    assert [health.rests(name) for name in NAMES] == [True, False, False]
    assert [health.reason(name) for name in NAMES] == ["reset", "", ""]


def test_if_all_rest_the_one_with_the_shortest_rest_is_tried_first() -> None:
    health = Health(NAMES)
    for now, name in ((3.0, "shm"), (1.0, "tcp"), (2.0, "process_group")):
        health.failed(name, "", now)

    assert health.order() == ("tcp", "process_group", "shm")


def test_a_transport_that_worked_is_retried_first() -> None:
    health = Health(("shm", "tcp"))
    health.failed("shm", "refused", 0.0)
    health.ready("tcp", 0.0)

    health.failed("tcp", "reset", 5.0)

    assert health.order() == ("tcp", "shm")
    health.failed("tcp", "refused", 6.0)
    assert health.order() == ("shm", "tcp")


def test_the_rest_doubles_with_every_failure_up_to_a_minute() -> None:
    health, now, rests = Health(NAMES), 0.0, []
    health.use("tcp")
    for _ in range(9):
        health.failed("shm", "", now)
        rest = next(rest for rest in (1, 2, 4, 8, 16, 32, 60) if health.due(now + rest) == "shm")
        assert health.due(now + rest - 0.001) is None
        rests.append(rest)
        now += rest

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_several_links_lost_at_once_are_one_failure() -> None:
    health = Health(NAMES)
    health.use("tcp")

    for _ in range(5):
        health.failed("shm", "", 10.0)

    assert health.due(11.0) == "shm"


def test_a_flapping_transport_rests_longer_each_time() -> None:
    flapping, steady = Health(NAMES), Health(NAMES)
    for health, held in ((flapping, 1.0), (steady, LONGEST_REST_S)):
        health.use("tcp")
        health.failed("shm", "", 0.0)
        health.ready("shm", 1.0)
        health.failed("shm", "", 1.0 + held)

    assert flapping.due(2.0 + 1.0) is None
    assert flapping.due(2.0 + 2.0) == "shm"
    assert steady.due(1.0 + LONGEST_REST_S + 1.0) == "shm"


def test_only_better_transports_than_the_current_are_due() -> None:
    health = Health(NAMES)
    for name in NAMES:
        health.failed(name, "", 0.0)

    assert health.due(100.0) is None
    health.use("process_group")
    assert health.due(100.0) == "shm"
    health.use("shm")
    assert health.due(100.0) is None


def test_a_slow_set_up_is_due_once_a_worse_transport_is_used() -> None:
    health = Health(NAMES)

    health.wait_for("process_group", "shm", 5.0)
    assert (health.use("shm"), health.due(5.0)) == (Change.NONE, None)
    assert (health.use("tcp"), health.due(5.0)) == (Change.FALLBACK, "process_group")
    health.ready("process_group", 6.0)
    assert health.use("process_group") is Change.BACK


def test_a_worse_transport_during_a_slow_set_up_is_no_fallback() -> None:
    health = Health(NAMES)

    health.wait_for("shm", "process_group", 5.0)

    assert health.use("process_group") is Change.NONE
    assert health.reason("shm") == "its link is being set up"


def test_what_is_measured_first_is_due_after_all_others() -> None:
    health = Health(NAMES, measured_first={"shm"})
    health.wait_for("shm", "tcp", 5.0)
    health.wait_for("process_group", "tcp", 5.0)

    assert (health.use("tcp"), health.due(5.0)) == (Change.NONE, "process_group")
    health.ready("process_group", 6.0)
    health.use("process_group")

    assert health.due(6.0) == "shm"
    assert [health.reason(name) for name in NAMES] == ["its link has not been measured yet", "", ""]


def test_a_slower_transport_is_due_once_a_worse_one_is_used() -> None:
    health = Health(NAMES, measured_first={"shm"})
    health.use("process_group")
    health.slower("shm", "process_group", "slower than process_group", 0.0)

    assert (health.reason("shm"), health.is_slower("shm", "process_group")) == ("slower than process_group", True)
    assert health.due(3600.0) is None
    health.use("tcp")
    assert health.due(LONGEST_REST_S - 1.0) is None  # a link that flaps is not measured all the time
    assert health.due(LONGEST_REST_S) == "shm"


def test_beside_a_measured_transport_what_failed_before_is_due() -> None:
    health = Health(NAMES, measured_first={"shm"})
    health.use("tcp")
    health.failed("process_group", "refused", 0.0)
    health.slower("tcp", "shm", "slower than shm", 0.0)
    health.use("shm")

    assert [health.due(now) for now in (0.9, 1.0)] == [None, "process_group"]
    health.slower("process_group", "shm", "slower than shm", 1.0)
    assert health.due(3600.0) is None
    health.failed("process_group", "reset", 3600.0)  # its next link may be another one
    assert health.due(3700.0) == "process_group"

    fallbacks = health.fallbacks
    health.slower("shm", "process_group", "slower than process_group", 3700.0)
    assert (health.use("process_group"), health.fallbacks) == (Change.NONE, fallbacks)
    assert health.due(7200.0) is None


def test_another_link_over_a_slower_transport_changes_no_finding() -> None:
    health = Health(NAMES, measured_first={"shm"})
    health.slower("tcp", "shm", "slower than shm", 0.0)
    health.use("shm")

    health.ready("tcp", 1.0)  # a link that was dialled before
    assert (health.reason("tcp"), health.is_slower("tcp", "shm")) == ("slower than shm", True)
    health.use("tcp")
    assert (health.reason("tcp"), health.is_slower("tcp", "shm")) == ("", False)


@pytest.mark.parametrize("lost", ["shm", "tcp"])
@pytest.mark.parametrize(("slower", "than"), [("shm", "tcp"), ("tcp", "shm")])
def test_a_lost_link_of_either_ends_what_was_measured(lost: str, slower: str, than: str) -> None:
    health = Health(NAMES, measured_first={"shm"})
    health.slower(slower, than, "slower than it", 0.0)

    health.failed("process_group", "reset", 1.0)
    assert health.is_slower(slower, than)
    health.failed(lost, "reset", 1.0)

    assert not health.is_slower(slower, than)
    assert "slower" not in health.reason(slower)


def test_a_worse_one_counts_as_a_fallback_once_until_a_better_returns() -> None:
    health = Health(NAMES)

    changes = [health.use(name) for name in ("shm", "tcp", "tcp", "process_group", "shm", "process_group")]

    assert changes == [Change.NONE, Change.FALLBACK, Change.NONE, Change.BACK, Change.BACK, Change.FALLBACK]
    assert health.fallbacks == 2


def test_the_first_link_over_a_worse_one_is_a_fallback() -> None:
    assert Health(NAMES).use("tcp") is Change.FALLBACK


def test_when_nothing_works_no_transport_is_blamed() -> None:
    health = Health(NAMES)
    for name in NAMES:
        health.failed(name, "refused", 0.0)

    health.forgive()

    assert health.order() == NAMES
    health.failed("shm", "", 5.0)
    health.use("tcp")
    assert health.due(6.0) == "shm"


def test_a_transport_that_is_ready_again_is_good_again() -> None:
    health = Health(NAMES)
    health.failed("shm", "reset", 0.0)

    health.ready("shm", 2.0)

    assert (health.order(), health.reason("shm"), health.rests("shm")) == (NAMES, "", False)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["failed", "ready", "use"]), st.floats(0, 50))))
def test_every_transport_stays_in_the_order_and_every_rest_ends(events: list[tuple[str, str, float]]) -> None:
    health, now = Health(NAMES), 0.0
    for name, what, later in events:
        now += later
        if what == "failed":
            health.failed(name, "", now)
        elif what == "ready":
            health.ready(name, now)
        else:
            health.use(name)
        assert sorted(health.order()) == sorted(NAMES)

    health.use("tcp")
    due = health.due(now + LONGEST_REST_S)
    assert due == next((name for name in NAMES[:2] if health.rests(name)), None)


def test_an_unreachable_transport_is_not_tried_and_no_fallback() -> None:
    health = Health(NAMES)

    health.reach({"tcp", "process_group"})

    assert health.order() == ("process_group", "tcp")
    assert health.use("process_group") is Change.NONE
    assert health.use("tcp") is Change.FALLBACK
    assert health.due(100.0) is None
