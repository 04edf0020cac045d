"""An invalid setting ends any process of a cluster before it serves."""

import pytest

from pdserve import launch
from processes.failpoints import VARIABLE, process_failpoints


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("kv.send.middle=kill9", "'kv.send.middle' is not a failpoint"),
        ("decode.token=corrupt", "decode.token has nothing to corrupt"),
        ("kv.send.mid=explode", "'kv.send.mid=explode' is not name=action"),
    ],
)
def test_an_invalid_setting_ends_the_process_with_one_line(
    setting: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process_failpoints.cache_clear()
    monkeypatch.setenv(VARIABLE, setting)

    try:
        assert launch.main([]) == 2
    finally:
        process_failpoints.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
