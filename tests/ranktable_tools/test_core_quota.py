"""The CPU quota of a process's control groups, in both cgroup versions, and the number of threads that it allows."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from ranktable_tools.core_quota import core_quota, usable_threads
from wire.types import Role

_GROUP = "sys/fs/cgroup"


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("200000 100000\n", 2.0), ("x", None), ("1 0", None), ("", None)]
)
def test_cpu_max_is_read_as_cgroups_write_it(text: str, quota: float | None, tmp_path: Path) -> None:
    assert core_quota(_machine(tmp_path, {f"{_GROUP}/cpu.max": text})) == quota


@pytest.mark.parametrize(("us", "quota"), [("150000\n", 1.5), ("-1\n", None)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_version_1_counts(mount: str, us: str, quota: float | None, tmp_path: Path) -> None:
    folder = f"{_GROUP}/{mount}"
    files = {f"{folder}/cpu.cfs_quota_us": us, f"{folder}/cpu.cfs_period_us": "100000\n"}

    assert core_quota(_machine(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("line", "folder"),
    [("0::/pods/a\n", f"{_GROUP}/pods"), ("0::/pods/a\n", f"{_GROUP}/pods/a"), ("2:cpu:/pods\n", f"{_GROUP}/cpu/pods")],
)
def test_the_smallest_quota_of_all_parent_groups_counts(line: str, folder: str, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": f"4:memory:/x\n{line}", f"{_GROUP}/cpu.max": "800000 100000\n"}

    root = _machine(tmp_path, files | {f"{folder}/cpu.max": "300000 100000\n"})

    assert core_quota(root) == 3.0


def test_a_cgroup_outside_the_mount_is_ignored(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../b\n", "sys/fs/b/cpu.max": "100000 100000\n"}

    assert core_quota(_machine(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("quota", "share", "threads"), [(None, 1.0, 8), ("250000", 1.0, 2), ("250000", 0.5, 1), ("50000", 1.0, 1)]
)
def test_threads_are_as_many_as_the_quota_allows(quota: str | None, share: float, threads: int, tmp_path: Path) -> None:
    root = _machine(tmp_path, {f"{_GROUP}/cpu.max": f"{quota or 'max'} 100000\n"})

    assert usable_threads(range(8), share=share, root=root) == threads


class _NumThreads(Exception):
    """Raised in place of preparing torch for so many threads."""


def _config(**fields: Any) -> InstanceConfig:
    return InstanceConfig(EngineOptions(model="m"), Role.COMBINED, cores=tuple(range(8)), **fields)


def _unused(*arguments: object) -> None:
    """Stand for a callback of an engine."""


@pytest.mark.parametrize(
    ("module_name", "load", "threads"),
    [
        ("instance.build", lambda module: module._torch_model(_config(), _unused, _unused), 2),
        ("instance.build", lambda module: module._torch_model(_config(quota_share=0.5), _unused, _unused), 1),
        ("instance.encoders", lambda module: module.load_encoder_engine(_config(), _unused), 2),
        ("instance.ranks", lambda module: module.ranks_model(_config(device_ids=("0", "1")), _unused), 1),
        ("pdserve.bench.engine", lambda module: module.main([]), 2),
        ("pdserve.selftest.command", lambda module: module.main([]), 2),
    ],
)
def test_everything_that_computes_keeps_to_the_quota(
    module_name: str, load: Callable[[Any], object], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record_num_threads(num_threads: int) -> None:
        raise _NumThreads(num_threads)

    module = importlib.import_module(module_name)
    monkeypatch.setattr(module, "prepare_torch", record_num_threads)
    monkeypatch.setattr("ranktable_tools.core_quota.core_quota", lambda root: 2.5)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name in ("logs", "unwind_on_sigterm"):  # would change this process
        if name in vars(module):
            monkeypatch.setattr(module, name, MagicMock())

    with pytest.raises(_NumThreads, match=f"^{threads}$"):
        load(module)
