"""The CPU quota of a process's control groups, in both cgroup versions, and the number of threads that it allows."""

from pathlib import Path

import pytest

from ranktable_tools.core_quota import core_quota, usable_threads

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
