"""How scripts/test runs: its workers, and under --all its parts and their results: `python -m tests.parts COMMAND`.

workers       processes in which tests run at once
names         the parts
paths PART    its folders; exit status 2 for a name that is none
folder        where the results of this commit lie, as pytest's JUnit XML
summary       what each part did there; exit status 1 unless all of them are green
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from devices.host_memory import available_bytes
from pdserve.run_folder import default_run_dir
from ranktable_tools.core_quota import usable_threads

LIMIT_S = 3600.0
"""Longest time of a part, on two quiet cores."""
WORKER_BYTES = 2 << 30
"""Memory for a worker and the processes that it starts."""
PARTS = {
    "engine": ("engine", "native", "npu", "devices"),
    "transfer": ("kvtransfer", "prefill_worker", "decode_worker", "instance", "testing"),
    "scheduler": (
        "scheduler",
        "flags",
        "images",
        "processes",
        "rpc",
        "security",
        "simulation",
        "wire",
        "telemetry",
        "batch",
        "remote_files",
        "ranktable_tools",
    ),
    "commands": ("pdserve", "conformance", "docs", "scripts", "benchmarks"),
    "clients": ("clients",),
    "cluster": ("cluster", "deploy", "ray"),
    "faults": ("faults",),
    "workers": ("workers",),
    "vllm-tests": ("vllm_server_tests",),
}
"""Folders below tests/ by part; tests/scripts/test_suite.py holds that none is missing."""
_ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str]) -> int:
    """Run the command named in `argv`; return the exit status."""
    match list(argv):
        case ["workers"]:
            print(num_workers(usable_threads(), available_bytes()))
        case ["names"]:
            print(*PARTS, sep="\n")
        case ["paths", part] if part in PARTS:
            print(*paths_of(part), sep="\n")
        case ["folder"]:
            print(results_folder(_ROOT))
        case ["summary"]:
            folder = results_folder(_ROOT)
            lines, is_green = summary(folder)
            print(f"{folder}:", *lines, sep="\n")
            return 0 if is_green else 1
        case _:
            sys.stderr.write(f"scripts/test: --all={''.join(argv[1:])}: the parts are {', '.join(PARTS)}\n")
            return 2
    return 0


def num_workers(cores: int, free_bytes: int) -> int:
    """Return one worker more than cores, as some wait for a process they started; from 3 to 8, as memory permits."""
    return max(3, min(8, cores + 1, free_bytes // WORKER_BYTES))


def paths_of(part: str) -> list[str]:
    """Return a part's folders, relative to the repository."""
    return [f"tests/{name}" for name in PARTS[part]]


def results_folder(root: Path) -> Path:
    """Return the folder for results of the tree at `root`: a changed tree has its own, beside its commit's."""
    commit = _git(root, "rev-parse", "HEAD")
    changed = "-changed" if _git(root, "status", "--porcelain") else ""
    return default_run_dir(os.environ) / "tests" / f"{commit}{changed}"


def summary(folder: Path) -> tuple[list[str], bool]:
    """Return a table of what each part did, and whether every part is green and within its time."""
    lines, is_green = [f"{'part':<12}passed  failed  skipped  time"], True
    for part in PARTS:
        row, is_good = _row(folder / f"{part}.xml")
        lines.append(f"{part:<12}{row}")
        is_green = is_green and is_good
    return lines, is_green


def _row(path: Path) -> tuple[str, bool]:
    if not path.exists():
        return "not run", False
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    time_s, failed = float(suite.attrib["time"]), failures + errors
    late = f"  over the limit of {LIMIT_S / 60:.0f} min" if time_s > LIMIT_S else ""
    passed = tests - failed - skipped
    row = f"{passed:6}  {failed:6}  {skipped:7}  {time_s / 60:.0f} min{late}"
    return row, bool(passed) and not (failed or late)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
