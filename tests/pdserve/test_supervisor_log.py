"""The supervisor's messages reach the terminal and, with the time, its log."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.supervisor_log import SupervisorLog


def test_each_line_is_printed_and_logged_with_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "supervisor.log"

    SupervisorLog(log).say("gave up on decode-0\n  its last line")

    assert capsys.readouterr().out == "gave up on decode-0\n  its last line\n"
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.fullmatch(rf"{time} gave up on decode-0\n{time}   its last line\n", log.read_text())


def test_a_new_run_keeps_the_last_runs_log(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    log.write_text("the end one looks for\n")

    SupervisorLog(log)

    assert log.read_text() == ""
    assert (tmp_path / "supervisor.log.1").read_text() == "the end one looks for\n"


def test_a_full_disk_costs_only_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = SupervisorLog(tmp_path / "logs" / "supervisor.log")
    shutil.rmtree(tmp_path / "logs")

    journal.say("decode-0 ended")

    assert capsys.readouterr().out == "decode-0 ended\n"


def test_a_closed_terminal_costs_only_its_own_messages(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    code = (
        "import sys; from pathlib import Path; from pdserve.supervisor_log import SupervisorLog\n"
        "journal = SupervisorLog(Path(sys.argv[1]))\nsys.stdin.read()\njournal.say('one')\njournal.say('two')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(log)], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, output = process.communicate(timeout=300)

    assert (process.returncode, output) == (0, b"")
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["one", "two"]
