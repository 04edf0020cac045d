"""HCCL's rules (hccl_rules.py) for a test, here and in the processes of groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from devices.collectives import COLLECTIVES
from kvtransfer.process_group import remote_group
from tests.kvtransfer.groups import group_threads
from tests.kvtransfer.hccl_rules import FOLDER, PROGRAM, HcclRules
from tests.kvtransfer.rig import until

_ROOT = Path(__file__).parents[2]


@contextmanager
def hccl_on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, *, on_host: bool = True) -> Iterator[HcclRules]:
    """Replace HCCL here and in the processes of groups; at the end no rule is broken, and nothing is left over."""
    rules = HcclRules(folder, on_host=on_host)
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.setattr(remote_group, "PROGRAM", PROGRAM)
    monkeypatch.setitem(COLLECTIVES, "hccl", rules.collective())
    yield rules
    assert rules.broken == []
    until(lambda: not group_threads())
    assert [one for one in psutil.Process().children() if PROGRAM in one.cmdline()] == []
