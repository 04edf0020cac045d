"""Failpoints act where and as often as they are set to, and an invalid setting is refused by name."""

import re

import pytest

from processes.failpoints import ACTIONS, BATCH_POINTS, POINTS, VARIABLE, Failpoints, process_failpoints
from wire.errors import ConfigError, InternalError


def test_unset_failpoints_do_nothing() -> None:
    points = Failpoints.parse("")

    assert not points
    assert not points.hit("kv.send.mid")


def test_corrupt_with_a_count_acts_on_the_first_hits_only() -> None:
    points = Failpoints.parse("kv.send.mid=corrupt*2; decode.token = raise")

    assert points
    assert [points.hit("kv.send.mid") for _ in range(4)] == [True, True, False, False]


def test_an_at_sign_selects_the_one_hit_that_acts() -> None:
    points = Failpoints.parse("decode.token=raise@2")

    assert not points.hit("decode.token")
    with pytest.raises(InternalError, match=r"failpoint decode\.token"):
        points.hit("decode.token")
    assert not points.hit("decode.token")


def test_delay_returns_and_does_not_corrupt() -> None:
    assert not Failpoints.parse("kv.before_ack=delay:0").hit("kv.before_ack")


def test_setting_one_failpoint_leaves_the_others_unset() -> None:
    assert not Failpoints.parse("kv.before_ack=raise").hit("kv.after_ack")


@pytest.mark.parametrize(
    "text",
    [
        "kv.before_ack", "kv.before_ack=explode", "kv.before_ack=raise*0", "kv.before_ack=raise@x",
        "kv.before_ack=delay", "kv.before_ack=delay:-1", "kv.before_ack=delay:nan", "kv.before_ack=delay:1e9",
        "=raise", "kv.before_ack=raise:3", "kv.before_ack=kill9@0", "engine.preempt=raise", "engine.preempt=after",
        "engine.preempt=after:0", "engine.preempt=after:2@1", "decode.token=after:2",
    ],
)  # fmt: skip
def test_a_malformed_setting_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))) as refused:
        Failpoints.parse(text)

    assert VARIABLE in str(refused.value)


def test_an_unknown_failpoint_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'kv\.sent\.mid' is not a failpoint") as refused:
        Failpoints.parse("kv.sent.mid=raise")

    assert all(name in str(refused.value) for name in (*POINTS, *BATCH_POINTS))


@pytest.mark.parametrize("name", [name for name, point in POINTS.items() if point.corrupts is None])
def test_corrupt_is_refused_by_name_where_there_are_no_bytes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has nothing to corrupt; corrupt works at kv.send.mid"):
        Failpoints.parse(f"{name}=corrupt")


def test_the_preempt_failpoint_takes_a_number_of_output_tokens() -> None:
    assert Failpoints.parse("kv.before_ack=raise; engine.preempt=after:2").preempt_after == 2
    assert Failpoints.parse("kv.before_ack=raise").preempt_after is None


def test_only_failpoints_of_the_hand_off_can_corrupt() -> None:
    spoiled = {name for name, point in POINTS.items() if point.corrupts is not None}

    assert spoiled
    assert all(name.startswith("kv.") for name in spoiled)


def test_a_failpoint_set_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv\.before_ack is set 2 times"):
        Failpoints.parse("kv.before_ack=raise@1;kv.before_ack=kill9@2")


@pytest.mark.parametrize("name", [*POINTS, *BATCH_POINTS])
def test_every_failpoint_names_its_process_and_its_actions(name: str) -> None:
    point = (POINTS | BATCH_POINTS)[name]

    assert point.who in (("P", "D", "scheduler") if name in POINTS else ("batch",))
    assert point.when
    for action in point.actions:
        assert action in ACTIONS
        Failpoints.parse(f"{name}={action}{':0' if action == 'delay' else ''}@1")


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process_failpoints.cache_clear()
    monkeypatch.setenv(VARIABLE, "kv.before_ack=raise")
    try:
        points = process_failpoints()
        monkeypatch.setenv(VARIABLE, "")

        assert process_failpoints() is points
        assert points
    finally:
        process_failpoints.cache_clear()
