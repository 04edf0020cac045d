"""What a launch imports before its tables are checked, and the help of commands that accept its flags."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from flags.groups import GROUPS, GUIDE
from flags.options import EngineOptions
from pdserve import cli, launch
from pdserve.workers.plan import plan_of_worker
from scheduler.config import SchedulerOptions
from tests.pdserve.broken_starts import TABLES
from tests.ranktable_tools.documents import group, grouped, local, modelarts, server

CLONE = Path(__file__).parents[2]
_HEAVY = {
    "devices.table", "fastapi", "google.protobuf", "grpc", "numpy", "orjson", "pydantic", "torch",
    "transformers", "uvicorn", "yaml",
}  # fmt: skip
_CODE = f"""\
import sys
from tests.docs.broken_input import answer
from tests.pdserve.broken_starts import TABLES
print([answer(row).status for row in TABLES], sorted({_HEAVY!r} & set(sys.modules)))
"""


def test_bad_tables_are_refused_before_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=300, check=False)

    assert done.stderr == ""
    assert done.stdout == f"{[2] * len(TABLES)} []\n"


@pytest.mark.parametrize("command", ["start_servers.sh", "up", "serve", "run-batch"])
def test_help_has_the_guides_ten_flags_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "start_servers.sh":
        launch.main(["--help"])
    else:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])

    output = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", output.partition(f"{GUIDE}:\n")[2], re.MULTILINE)
    assert flags[:10] == ["--" + name.replace("_", "-") for name in GROUPS[GUIDE]]
    titles = re.findall(r"^([A-Za-z' ()]+):$", output, re.MULTILINE)
    assert titles.index(GUIDE) < titles.index("options")
    assert "more" not in titles


def test_every_group_names_existing_flags() -> None:
    there = {field.name for options in (EngineOptions, SchedulerOptions) for field in fields(options)}

    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(set(named) & there)


_SHOWN = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def test_start_servers_becomes_the_worker_that_the_table_lists(tmp_path: Path) -> None:
    """The program here prints its command line and environment in place of vLLM."""
    host, prefill, decode = server("127.0.0.1"), *(server("127.0.0.1", one, worker="vllm") for one in (4, 6))
    table = grouped(group(0, host), group(1, prefill), group(2, decode))
    for name, document in (("g.json", table), ("l.json", local(decode))):
        (tmp_path / name).write_text(json.dumps(document))
    environ = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(CLONE), "PDSERVE_PYTHON": sys.executable, "HF_TOKEN": "s3cret!",
        "PDSERVE_WORKER": "vllm",
        "PDSERVE_VLLM_COMMAND": f"{sys.executable} -c '{_SHOWN}'", "GLOBAL_RANK_TABLE_FILE_PATH": "g.json",
        "RANK_TABLE_FILE_PATH": "l.json", "NODE_PORTS": "8088,8089", "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
    }  # fmt: skip
    words = ["--model=/m", "--port=18089", "--max-model-len=512", "--api-key", "s3cret!"]

    done = _started(words, environ | {"VLLM_NIXL_SIDE_CHANNEL_PORT": "15696"}, tmp_path)

    first, *_, starting, shown = done.stdout.splitlines()
    assert first == "this process is decode-0 (127.0.0.1, devices 6)"
    assert starting.startswith("starting: ")
    assert " serve /m --host 127.0.0.1 --tensor-parallel-size 1 " in starting
    assert "s3cret!" not in done.stdout.replace(shown, "")
    argv, variables = json.loads(shown)
    assert argv[:2] == ["serve", "/m"]
    assert argv[-4:] == words[1:]
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert not [name for name in variables if name.startswith("PDSERVE_")]

    done = _started(words, environ, tmp_path)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT is '0', which is not in 1..65535" in done.stderr


def _started(words: list[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(CLONE / "deploy" / "PD_separate" / "start_servers.sh"), *words]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("worker", ["", "vllm", "vllm-ascend"])
def test_the_variable_changes_nothing_for_the_scheduler(worker: str, tmp_path: Path) -> None:
    host = server("192.0.2.1")
    for name, document in (("g.json", modelarts()), ("host.json", local(host))):
        (tmp_path / name).write_text(json.dumps(document))
    environ = {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "g.json"), "PDSERVE_WORKER": worker,
        "RANK_TABLE_FILE_PATH": str(tmp_path / "host.json"), "NODE_PORTS": "8088,8089",
    }  # fmt: skip

    assert plan_of_worker(["--port=9000"], environ) is None
    assert launch.plan_of(["--port=9000"], environ).role == "scheduler"
