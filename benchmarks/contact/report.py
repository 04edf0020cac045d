"""The folder of a first contact: report.md for people, steps.json to resume from; neither contains secrets."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.env_facts import machine_facts
from pdserve.redaction import redacted, secret_values
from pdserve.text_table import printable
from ranktable_tools.devices.kinds import kind_named
from ranktable_tools.doctor.machine import Machine

DONE = "ok"
_NOT_MEASURED = "not measured"
_LOG_LINES, _GIT_S = 20, 20.0
_HEAD = ("step", "result", "seconds", "figure", "of the floor")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement, or what could not be measured; `fraction` is its share of the best possible value, if known."""

    text: str
    fraction: float | None = None
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ended: "ok", "not measured: REASON", "exit status 1", "timed out after 480 s", ..."""

    words: str
    seconds: float
    figures: tuple[Figure, ...]


class Report:
    """Owner of the folder's two files, which are replaced after each step."""

    def __init__(
        self, folder: Path, kind: str, described: str, names: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        named = environ.get("PDSERVE_SECRET_FILE")
        self.secrets = secret_values(environ, [Path(named)] if named else [])
        self.path, self._state = folder / "report.md", folder / "steps.json"
        self._title = (f"# First contact: {kind}", "", f"{printable(described)}; commit {_commit()}")
        self._names, self._facts = names, machine_facts(Machine(environ, kind=kind_named(kind)))
        folder.mkdir(parents=True, exist_ok=True)
        self._results = _read(self._state)

    def is_done(self, name: str) -> bool:
        """Return whether a step ended well."""
        found = self._results.get(name)
        return found is not None and found.words == DONE

    @property
    def failed(self) -> list[str]:
        """The steps that ran and did not end well."""
        ran = (name for name in self._names if name in self._results and not self.is_done(name))
        return [name for name in ran if not self._results[name].words.startswith(_NOT_MEASURED)]

    def add(self, name: str, result: StepResult) -> None:
        """Record a step's result and write both files."""
        self._results[name] = result
        self.write()

    def write(self) -> None:
        """Write both files."""
        state = {name: asdict(result) for name, result in self._results.items()}
        self._replace(self._state, json.dumps(state, indent=1) + "\n")
        rows = [row for name in self._names for row in self._rows(name)]
        lines = [" | ".join(_HEAD), "|".join(["---"] * len(_HEAD)), *(" | ".join(row) for row in rows)]
        facts = [
            line
            for title, section in self._facts.items()
            for line in (f"[{title}]", *(f"{name}: {printable(value)}" for name, value in section.items()), "")
        ]
        table = [f"| {line} |" if "---" not in line else f"|{line}|" for line in lines]
        logs = [line for name in self.failed for line in self._end_of_log(name)]
        self._replace(self.path, "\n".join((*self._title, "", *table, "", "```text", *facts[:-1], "```", "", *logs)))

    def _end_of_log(self, name: str) -> list[str]:
        log = self.path.parent / "logs" / f"{name}.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        if not lines:
            return []
        return [f"## The end of logs/{name}.log", "", "```text", *map(printable, lines[-_LOG_LINES:]), "```", ""]

    def _rows(self, name: str) -> list[tuple[str, ...]]:
        result = self._results.get(name)
        if result is None:
            return [(name, _NOT_MEASURED, "", "", "")]
        words = _cell(result.words)
        figures = [
            (_cell(one.text), "" if one.fraction is None else f"{one.fraction:.0%}") for one in result.figures
        ] or [("" if result.words.startswith(_NOT_MEASURED) else _NOT_MEASURED, "")]
        head = (name, words, f"{result.seconds:.0f}" if result.seconds else "")
        return [(*(head if at == 0 else ("", "", "")), *figure) for at, figure in enumerate(figures)]

    def _replace(self, path: Path, text: str) -> None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(redacted(text, self.secrets), encoding="utf-8")
        os.replace(part, path)


def _commit() -> str:
    """Return the commit of this clone, and whether files differ from it; "unknown" without git."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    return found or "unknown"


def _cell(text: str) -> str:
    return printable(text).replace("|", "/")


def _read(state: Path) -> dict[str, StepResult]:
    """Return the results of an earlier run; a step recorded as running counts as interrupted."""
    if not state.exists():
        return {}
    found = {
        name: StepResult(one["words"], one["seconds"], tuple(Figure(**figure) for figure in one["figures"]))
        for name, one in json.loads(state.read_text(encoding="utf-8")).items()
    }
    cut = StepResult("interrupted", 0.0, ())
    return {name: cut if result.words == "running" else result for name, result in found.items()}
