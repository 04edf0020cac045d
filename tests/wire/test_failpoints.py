"""Failpoints act where and as often as they are told."""

import pytest

from wire.errors import ConfigError, InternalError
from wire.failpoints import Failpoints


def test_unset_failpoints_do_nothing() -> None:
    points = Failpoints.parse("")

    assert not points.hit("kv.send.mid")


def test_corrupt_with_a_count_acts_on_the_first_hits_only() -> None:
    points = Failpoints.parse("kv.send.mid=corrupt*2; other=raise")

    assert [points.hit("kv.send.mid") for _ in range(4)] == [True, True, False, False]


def test_an_at_sign_names_the_one_hit_that_acts() -> None:
    points = Failpoints.parse("a=raise@2")

    assert not points.hit("a")
    with pytest.raises(InternalError, match="failpoint a"):
        points.hit("a")
    assert not points.hit("a")


def test_delay_returns_and_does_not_corrupt() -> None:
    assert not Failpoints.parse("a=delay:0").hit("a")


@pytest.mark.parametrize("text", ["a", "a=explode", "a=raise*0", "a=raise@x", "a=delay", "=raise", "a=raise:3"])
def test_a_malformed_setting_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="PDSERVE_FAILPOINTS"):
        Failpoints.parse(text)
