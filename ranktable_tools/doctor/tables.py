"""Check the tables, the cluster secret beside them, and the related environment variables."""

import os
import stat
from pathlib import Path

from ranktable_tools.doctor.case import GLOBAL_VARIABLE, DoctorInput, table_folder
from ranktable_tools.doctor.verdict import Verdict, combined, fail, not_here, ok, warn
from ranktable_tools.lint import LintOptions, lint
from ranktable_tools.secret import SECRET_NAME

_SECRET_VARIABLE = "PDSERVE_SECRET_FILE"  # noqa: S105 - a variable's name
_SECRET_BYTES = range(32, 4097)


def check_tables(case: DoctorInput) -> Verdict:
    """Check that the tables can be read, lint finds no error, and the local table is an entry of the global one."""
    tables = case.tables
    files = [path for path in (tables.global_path, tables.local_path) if path is not None]
    step = f"ranktable lint {' '.join(files)}{' --share-devices' if tables.share_devices else ''}"
    if tables.problem:
        return fail(tables.problem, step if files else "")
    if tables.table is None:
        return not_here("no global table was given", f"name it, or set {GLOBAL_VARIABLE}")
    node_ports = case.machine.environ.get("NODE_PORTS") or None
    options = LintOptions(share_devices=tables.share_devices, node_ports=node_ports)
    wrong = [str(found) for found in lint(files, options) if found.severity == "error"]
    if wrong:
        return fail(wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""), step)
    counts = f"{len(tables.table.prefill)} prefill, {len(tables.table.decode)} decode"
    if tables.local is None:
        return ok(f"{counts}, {len(case.here)} of them on this host")
    return ok(f"{counts}; this process is {'the scheduler' if tables.own is None else tables.own}")


def check_secret(case: DoctorInput) -> Verdict:
    """Check that the cluster secret exists, has an allowed size, and is private."""
    if case.tables.global_path is None:
        return not_here("no global table was given")
    named = case.machine.environ.get(_SECRET_VARIABLE)
    path = Path(named or os.path.join(table_folder(case.tables), SECRET_NAME))
    try:
        found = path.stat()
    except OSError as error:
        if named:
            return fail(
                f"{_SECRET_VARIABLE} names {path}: {error.strerror}", f"unset {_SECRET_VARIABLE}, or write that file"
            )
        return warn(
            f"there is no {path}: peers are identified only by their addresses",
            "copy the file that gen or merge wrote, on every host into the folder of the global table",
        )
    return _check_secret_file(path, found)


def check_variables(case: DoctorInput) -> Verdict:
    """Check that RANK_TABLE_FILE, which torch_npu reads, is not set, and that USE_OPENAI has an allowed value."""
    environ, problems = case.machine.environ, []
    if environ.get("RANK_TABLE_FILE"):
        problems.append(
            warn(
                "RANK_TABLE_FILE is set: torch_npu builds its groups from it",
                "unset RANK_TABLE_FILE (start_servers.sh does it for its process)",
            )
        )
    if environ.get("USE_OPENAI", "1") not in ("0", "1"):
        problems.append(fail(f"USE_OPENAI is {environ['USE_OPENAI'][:20]!r}", "export USE_OPENAI=1"))
    return combined(problems, "no conflicting variable")


def check_llm_tools_path(case: DoctorInput) -> Verdict:
    """Check that the guide's variable LLM_TOOLS_PATH leads to the ranktable tool."""
    folder = case.machine.environ.get("LLM_TOOLS_PATH")
    clone = Path(__file__).resolve().parents[2] / "deploy"
    export = f"export LLM_TOOLS_PATH={clone if clone.is_dir() else 'CLONE/deploy'}"
    if not folder:
        return not_here("LLM_TOOLS_PATH is not set; only the guide's own lines need it", export)
    tool = os.path.join(folder, "PD_separate", "pd_ranktable_tools.py")
    return ok(f"{tool} is there") if os.path.exists(tool) else fail(f"there is no {tool}", export)


def _check_secret_file(path: Path, found: os.stat_result) -> Verdict:
    mode, size = stat.S_IMODE(found.st_mode), found.st_size
    if found.st_uid not in (os.getuid(), 0):
        return fail(
            f"{path} belongs to uid {found.st_uid}, but this is uid {os.getuid()}", f"chown {os.getuid()} {path}"
        )
    if mode & 0o077:
        return fail(f"{path} has mode {mode:04o}: others may have access", f"chmod 600 {path}")
    if size not in _SECRET_BYTES:
        return fail(f"{path} has {size} bytes, not 32 to 4096", "write it again: ranktable gen, or merge")
    if not os.access(path, os.R_OK) and found.st_uid == os.getuid():
        message = f"{path} has mode {mode:04o}: its owner, uid {found.st_uid}, may not read it"
        return fail(message, f"chmod 600 {path}")
    if not os.access(path, os.R_OK):
        return fail(f"{path} is not readable by uid {os.getuid()}", f"chown {os.getuid()} {path}")
    return ok(f"{path} is there, mode {mode:04o}")
