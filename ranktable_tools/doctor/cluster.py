"""Check the running cluster with pdserve's own commands: a ready scheduler, one model, a link for every pair."""

import http.client
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ranktable_tools.devices.tools import run_tool
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict, combined, counted, fail, not_here, ok, warn

_PYTHON_VARIABLE = "PDSERVE_PYTHON"
_MAX_BYTES = 1 << 20
_OBJECT = re.compile(r"^\{", re.MULTILINE)
_NO_SCHEDULER = "no scheduler answers at"


def check_scheduler(case: DoctorInput) -> Verdict:
    """Check that the scheduler responds and is ready to serve requests."""
    url = case.base_url
    if url is None:
        return not_here("no scheduler is known", "pass --url or a global table")
    try:
        status, body = _get(url, "/ready", case.connect_s)
    except (OSError, http.client.HTTPException) as error:
        return not_here(f"{_NO_SCHEDULER} {url}: {error}", "start it, or pass another address with --url")
    if status == 200:
        return ok(f"{url} is ready")
    missing = body.get("missing") if isinstance(body, dict) else None
    if not isinstance(missing, list):
        return fail(
            f"{url}/ready answers {status}: that is not a pdserve scheduler", "pass the scheduler's address with --url"
        )
    return warn(f"{url} is not ready: {'; '.join(map(str, missing))}", "pdserve status")


def check_model(case: DoctorInput) -> Verdict:
    """Check that the responding instances have the same model and layout, and are those of the table."""
    if case.tables.global_path is None or case.tables.table is None:
        return not_here("no global table was given")
    flags = ("--timeout", f"{case.connect_s:g}", *case.tls)
    found = _run_pdserve(case, "instances", "pdserve.describe", case.tables.global_path, *flags)
    if isinstance(found, Verdict):
        return found
    instances = found["instances"]
    refusals = [_refusal_verdict(one["error"]) for one in instances if one["refused"]]
    answered = [one for one in instances if not one["error"]]
    if not answered:
        return combined(refusals, "") if refusals else not_here("no instance answers", "start them")
    differences = [
        fail(str(message), "give every instance the same --model and --dtype") for message in found["differences"]
    ]
    first = answered[0]
    silent = len(instances) - len(answered)
    rest = f"; {silent} more do{'es' if silent == 1 else ''} not answer" if silent else ""
    return combined(
        [*refusals, *differences], f"{counted(len(answered), 'instance')} with {first['model']}, {first['dtype']}{rest}"
    )


def check_links(case: DoctorInput) -> Verdict:
    """Check that every prefill-decode pair has a link, by measuring it."""
    if case.base_url is None:
        return not_here("no scheduler is known", "pass --url or a global table")
    found = _run_pdserve(case, "links", "pdserve", "links", "--json", "--mib", str(case.mib), "--url", case.base_url)
    if isinstance(found, Verdict):
        return found
    links = found.get("links", [])
    if not links:
        return not_here("no pair of a prefill and a decode instance")
    problems = [fail(f"{_pair_name(link)}: {link['error']}", "pdserve links") for link in links if link.get("error")]
    problems += [
        warn(
            f"{_pair_name(link)}: {counted(link['fallbacks'], 'fallback')}; the link now uses {link['transport']}",
            "pdserve links shows why",
        )
        for link in links
        if link.get("fallbacks") and not link.get("error")
    ]
    note = f" ({found['note']})" if found.get("note") else ""
    return combined(problems, ", ".join(map(_describe_speed, links)) + note)


def _get(url: str, path: str, timeout_s: float) -> tuple[int, Any]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES)
    finally:
        connection.close()
    try:
        return answer.status, json.loads(body)
    except ValueError:
        return answer.status, None


def _run_pdserve(case: DoctorInput, key: str, module: str, *arguments: str) -> dict[str, Any] | Verdict:
    """Return the JSON object with `key` that a pdserve command prints, or a verdict if it prints none."""
    environ = {**case.machine.environ, "PYTHONPATH": _python_path(case.machine.environ.get("PYTHONPATH"))}
    python = environ.get(_PYTHON_VARIABLE) or sys.executable
    answer = run_tool((python, "-P", "-m", module, *arguments), timeout_s=case.command_s, environ=environ)
    found = _object_with(key, answer.text)
    if found is not None:
        return found
    last = next((line for line in reversed(answer.text.splitlines()) if line.strip()), "nothing")
    return not_here(last.partition(": ")[2] or last)


def _object_with(key: str, text: str) -> dict[str, Any] | None:
    """Return the first JSON object that starts a line and has `key`; progress and logs around it are skipped."""
    decoder = json.JSONDecoder()
    for match in _OBJECT.finditer(text):
        try:
            found, _ = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(found, dict) and key in found:
            return found
    return None


def _python_path(known: str | None) -> str:
    clone = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([clone, known] if known else [clone])


def _refusal_verdict(message: str) -> Verdict:
    if "secret" in message:
        return fail(message, "give every host the same cluster_secret")
    return fail(message, "check which server listens there: server_port and NODE_PORTS are the instances' ports")


def _pair_name(link: dict[str, Any]) -> str:
    return f"{link['prefill']} to {link['decode']}"


def _describe_speed(link: dict[str, Any]) -> str:
    rate = link.get("bytes_per_s")
    measured = f" {rate / 1e9:.2f} GB/s" if rate else ""
    return f"{_pair_name(link)} {link.get('transport') or 'no link yet'}{measured}"
