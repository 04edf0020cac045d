"""The report file of a self-test: text at the top, and below it a JSON block for programs. It has no secrets.

It is Markdown, to be pasted into a bug report.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.env_facts import Section, machine_facts
from pdserve.redaction import redacted, secret_values
from pdserve.selftest.captured_output import tail
from pdserve.selftest.check import CheckStatus, Result
from pdserve.text_table import printable, text_table
from ranktable_tools.doctor.machine import Machine

_MORE_VARIABLES = (
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_SLOG_PRINT_TO_STDOUT", "ASCEND_GLOBAL_LOG_LEVEL",
    "P2P_HCCL_BUFFSIZE", "HCCL_WHITELIST_DISABLE", "NCCL_DEBUG", "NCCL_MAX_NCHANNELS", "GOMP_SPINCOUNT",
)  # fmt: skip
"""Shown in addition to those of `pdserve collect-env`."""


@dataclass(frozen=True, slots=True)
class Tested:
    """What was tested: the device, why it was chosen, its description, and notes from loading the tiny model.

    `command` is the command line, `began` its local start time.
    """

    device: str
    choice: str
    described: str
    command: str
    began: str
    notes: tuple[str, ...] = ()


def row(number: int, total: int, result: Result) -> str:
    """Return the terminal's line for a finished check."""
    place, what = f"[{number}/{total}]", f"{result.group}: {result.name}"
    line = f"{place:<8} {result.verdict.value:<9} {what:<52} {result.seconds:6.2f} s  {result.words}"
    return printable(line.rstrip())


def summary(results: Sequence[Result], num_checks: int) -> str:
    """Return the last line: the count of each status, and the total if not all checks have finished."""
    counts = Counter(result.verdict for result in results)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in CheckStatus if counts[verdict]]
    checks = f"{num_checks} check{'' if num_checks == 1 else 's'}"
    ended = checks if len(results) == num_checks else f"stopped after {len(results)} of {checks}"
    return f"{ended}: {', '.join(parts)}" if parts else ended


class SelftestReport:
    """The report file, replaced atomically after each row. Facts about the machine are read once.

    `logs` is the folder of the files with library output.
    """

    def __init__(self, path: Path, tested: Tested, machine: Machine, logs: Path) -> None:
        self.path, self.tested, self._logs = path, tested, logs
        self._secrets = secret_values(machine.environ, _secret_files(machine.environ))
        self._facts: dict[str, Section] = dict(machine_facts(machine))
        more = {name: machine.environ[name] for name in _MORE_VARIABLES if name in machine.environ}
        self._facts["environment"] = {**self._facts["environment"], **more}

    def write(self, results: Sequence[Result], num_checks: int, running: str | None = None) -> None:
        """Write the results so far; `running` is the unfinished row. Raises OSError."""
        text = redacted(_text(self.tested, results, num_checks, self._facts, running, self._logs), self._secrets)
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)


def _text(
    tested: Tested, results: Sequence[Result], num_checks: int, facts: Mapping[str, Section], running: str | None,
    logs: Path,
) -> str:  # fmt: skip
    table = text_table(
        ("result", "check", "", "seconds", "words"),
        [(one.verdict.value, one.group, one.name, f"{one.seconds:.2f}", one.words) for one in results],
    )
    sections = [
        line
        for title, section in facts.items()
        for line in (f"[{title}]", *(f"{name}: {printable(value)}" for name, value in section.items()), "")
    ]
    output = [
        line
        for log in sorted(logs.glob("*.log"))
        if (printed := tail(log))
        for line in ("", f"[printed by libraries, the end of {log.name}]", *map(printable, printed))
    ]
    document = {
        "tested": asdict(tested), "results": [asdict(one) for one in results], "facts": facts,
        "failed": [f"{one.group}: {one.name}" for one in results if one.verdict is CheckStatus.FAILED],
        "num_checks": num_checks, "running": running,
    }  # fmt: skip
    stopped = [] if running is None else [
        "", f"This row was started but did not finish: **{running}**",
        f"(library output is in {logs} if a signal ended the process)",
    ]  # fmt: skip
    lines = [
        f"# pdserve selftest on {tested.device}: {summary(results, num_checks)}", "",
        f"{tested.choice}; {tested.described}",
        f"({tested.began}: `{tested.command}`)", *stopped, *(f"- {note}" for note in tested.notes), "",
        "```text", *table, "", *sections[:-1], *output, "```", "",
        "```json", json.dumps(document, indent=2), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _secret_files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get("PDSERVE_SECRET_FILE")
    return [Path(named)] if named else []


def default_path(device: str, stamp: str) -> Path:
    """Return the default report path, in the current folder."""
    return Path.cwd() / f"pdserve-selftest-{device.replace(':', '')}-{stamp}.md"
