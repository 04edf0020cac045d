"""What remains of a command's folder."""

import contextlib
import tempfile
from pathlib import Path

import pytest

from pdserve.work_folder import work_folder
from wire.errors import ConfigError


@pytest.mark.parametrize(
    ("ending", "kept"), [(None, 0), (KeyboardInterrupt(), 0), (SystemExit(143), 0), (ConfigError("no"), 1)]
)
def test_the_logs_remain_after_a_failure_and_not_after_ctrl_c(
    ending: BaseException | None, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with contextlib.suppress(KeyboardInterrupt, SystemExit, ConfigError), work_folder("verify") as work:
        (work / "shm.log").touch()
        if ending is not None:
            raise ending

    assert len(list(tmp_path.iterdir())) == kept


def test_a_failure_before_the_first_log_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(ConfigError), work_folder("verify"):
        raise ConfigError("no")

    assert list(tmp_path.iterdir()) == []
