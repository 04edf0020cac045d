"""`pdserve collect-env`: facts for a bug report, including the doctor's findings, without secrets."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.env_facts import Section, machine_facts
from pdserve.flags.parser import CommandParser
from pdserve.redaction import redacted, secret_values
from pdserve.run_folder import RunFolder, default_run_dir
from pdserve.target_cluster import add_where, base_url, find
from pdserve.text_table import printable
from ranktable_tools.devices.kinds import KINDS
from ranktable_tools.doctor.case import DoctorInput, DoctorTables, read_tables, table_folder
from ranktable_tools.doctor.checks import CHECKS
from ranktable_tools.doctor.examination import TIMEOUT_S, examine
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.verdict import Result
from ranktable_tools.secret import SECRET_NAME
from wire.errors import ConfigError

_Check = tuple[str, Result, str]
EPILOG = """\
The report has versions, hardware, limits, a fixed list of variables, the tables' entries, and the findings of
`ranktable doctor`. Values of variables that are named like a secret, the cluster secret and proxy passwords are hidden
everywhere; other variables, command lines and logs are not read. Check the report before you share it: it has host
names and paths.

examples:
  pdserve collect-env > report.txt
  pdserve collect-env global_ranktable_10.0.0.18.json local_ranktable_10.0.0.18_45.json
  pdserve collect-env --format json
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 whatever the findings are."""
    parser = CommandParser(
        prog="pdserve collect-env", description="Print facts about this machine and its cluster for a bug report.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("files", nargs="*", metavar="FILE", help="global and local table (default: the environment's)")
    add_where(parser)
    parser.add_argument("--device-type", choices=KINDS, help="default: npu or cuda where one is in /dev, else cpu")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for all checks (default: 60)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout <= 3600:
        raise ConfigError(f"--timeout is {arguments.timeout:g}, but must be more than 0 and at most 3600 seconds")
    machine = Machine(os.environ, kind=arguments.device_type)
    tables, url = _cluster(arguments, machine)
    case = DoctorInput(machine, tables, url)
    print(report(case, arguments.timeout, as_json=arguments.format == "json"))
    return 0


def _cluster(arguments: argparse.Namespace, machine: Machine) -> tuple[DoctorTables, str | None]:
    """Return the tables given, else those of the cluster that `pdserve up` runs, and the scheduler's URL."""
    tables = read_tables(arguments.files, machine)
    if tables.global_path is not None or tables.local_path is not None:
        return tables, None if arguments.url is None else base_url(arguments.url)
    try:
        where = find(arguments.url, arguments.run_dir)
    except ConfigError as error:
        if arguments.url is not None or arguments.run_dir is not None:
            raise
        return DoctorTables(problem=str(error)), None  # a broken state file belongs in the report
    if where.state is None:
        return tables, None if arguments.url is None else where.base_url
    folder = RunFolder(Path(arguments.run_dir or default_run_dir(machine.environ)).absolute()).tables
    return read_tables([str(path) for path in sorted(folder.glob("global_ranktable_*.json"))], machine), where.base_url


def report(case: DoctorInput, timeout_s: float, *, as_json: bool = False) -> str:
    """Return the whole report with secrets hidden."""
    secrets = secret_values(case.machine.environ, _secret_files(case))
    facts = {**machine_facts(case.machine), "tables": dict(_entries(case.tables))}
    sections = {
        title: {name: redacted(value, secrets) for name, value in section.items()} for title, section in facts.items()
    }
    findings = examine(case, timeout_s, CHECKS)
    checks = [(one.name, one.verdict.result, redacted(one.verdict.message, secrets)) for one in findings]
    return _json(sections, checks) if as_json else "\n".join(_lines(sections, checks))


def _entries(tables: DoctorTables) -> list[tuple[str, str]]:
    if tables.table is None:
        return [("problem", tables.problem)] if tables.problem else []
    entries = [("scheduler", tables.table.scheduler.server_ip)]
    for one in tables.table.instances:
        port = "" if one.server.server_port is None else f" port {one.server.server_port}"
        entries.append((str(one), f"{one.server.server_ip} devices {','.join(one.server.device_ids)}{port}"))
    return entries


def _lines(sections: Mapping[str, Section], checks: Sequence[_Check]) -> list[str]:
    found = {name: f"{result}: {message}" for name, result, message in checks}
    lines: list[str] = []
    for title, section in {**sections, "doctor": found}.items():
        width = max(map(len, section), default=0)
        lines += [f"[{title}]", *(f"{name.ljust(width)}  {printable(value)}" for name, value in section.items()), ""]
    return lines[:-1]


def _json(sections: Mapping[str, Section], checks: Sequence[_Check]) -> str:
    found = [{"name": name, "result": result, "words": message} for name, result, message in checks]
    return json.dumps({**sections, "doctor": found}, indent=2)


def _secret_files(case: DoctorInput) -> list[Path]:
    named = case.machine.environ.get("PDSERVE_SECRET_FILE")
    default_paths = [] if case.tables.global_path is None else [Path(table_folder(case.tables)) / SECRET_NAME]
    return [*([Path(named)] if named else []), *default_paths]
