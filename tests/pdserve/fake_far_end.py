"""The far end of a self-test's links, for devices that exist only in tests.

`python -m tests.pdserve.fake_far_end fake:0`. Their drivers print on stdout, where the answers go.
"""

import os
import sys
from pathlib import Path

import pytest

from devices import npu
from devices.table import KINDS
from pdserve.selftest.far_end import main
from tests.devices.fake_device import FakeDevice, FakeKind

HELLO = "a driver says hello"


class TalkingKind(FakeKind):
    """Prints a line whenever a device is opened."""

    def open(self, index: int = 0) -> FakeDevice:
        os.write(1, f"{HELLO}\n".encode())
        return super().open(index)


def take_fake_far_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make self-tests of this process start this module."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("pdserve.selftest.far_process.COMMAND", (sys.executable, "-P", "-m", __name__))


if __name__ == "__main__":
    KINDS["fake"] = TalkingKind()
    KINDS["npu"] = TalkingKind(npu.TRAITS)
    sys.exit(main(sys.argv[1:]))
