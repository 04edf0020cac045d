"""The doctor's checks of a running cluster: the scheduler's /ready, and stand-ins for pdserve's own commands."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.cluster import check_links, check_model, check_scheduler
from tests.ranktable_tools.bench import HERE, Bench, server, tables

URL = "http://127.0.0.1:9000"
DESCRIBE = "-P -m pdserve.describe global.json --timeout 2"
LINKS = f"-P -m pdserve links --json --mib 16 --url {URL}"
GIVEN = tables([server(HERE, "0")], [server(HERE, "1")])


@contextmanager
def _scheduler(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((HERE, 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
    thread.join(300)


def _case(bench: Bench, answers: dict[str, str], other: str = "") -> DoctorInput:
    bench.tool("python", answers, other)
    return bench.case(GIVEN, {"PDSERVE_PYTHON": str(bench.tools / "python")})


def _instance(**changes: Any) -> dict[str, Any]:
    return {"error": "", "refused": False, "model": "SmolLM2", "dtype": "bfloat16", **changes}


def _link(**changes: Any) -> dict[str, Any]:
    link = {"prefill": "prefill-0", "decode": "decode-0", "transport": "shm", "bytes_per_s": 5.25e9, "fallbacks": 0}
    return {**link, "error": "", **changes}


@pytest.mark.parametrize(
    ("status", "body", "result", "words"),
    [
        (200, '{"ready": true, "missing": []}', "ok", "URL is ready"),
        (503, '{"missing": ["no decode instance"]}', "warn", "URL is not ready: no decode instance"),
        (404, "not found", "fail", "URL/ready answers 404: that is not a pdserve scheduler"),
    ],
)
def test_the_scheduler_is_ready_or_names_what_is_missing(
    tmp_path: Path, status: int, body: str, result: str, words: str
) -> None:
    with _scheduler(status, body) as url:
        verdict = check_scheduler(Bench(tmp_path).case(url=url))

    assert (verdict.result, verdict.message.replace(url, "URL")) == (result, words)


def test_without_a_scheduler_there_is_nothing_to_check_yet(tmp_path: Path) -> None:
    unknown = check_scheduler(Bench(tmp_path).case())
    absent = check_scheduler(Bench(tmp_path / "b").case(url="http://127.0.0.1:1"))

    assert (unknown.result, unknown.message) == ("not here", "no scheduler is known")
    assert absent.message.startswith("no scheduler answers at http://127.0.0.1:1: ")


def test_the_schedulers_address_is_the_tables_by_default(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wide = tables([server(HERE, "0")], [server(HERE, "1")], scheduler="fd00::7")

    assert bench.case(GIVEN).base_url == URL
    assert bench.case(wide).base_url == "http://[fd00::7]:9000"
    assert bench.case(GIVEN, url="http://x:1").base_url == "http://x:1"


def test_one_model_on_all_instances_is_ok(tmp_path: Path) -> None:
    reported = {"instances": [_instance(), _instance(), _instance(error="gone")], "differences": []}
    before = 'a warning\n{not JSON\n{"level": "warning", "event": "a log line"}\n'

    verdict = check_model(_case(Bench(tmp_path), {DESCRIBE: before + json.dumps(reported, indent=2) + "\nafter\n"}))

    assert verdict.message == "2 instances with SmolLM2, bfloat16; 1 more does not answer"
    assert verdict.result == "ok"


def test_tls_flags_are_passed_on(tmp_path: Path) -> None:
    reported = {"instances": [_instance()], "differences": []}
    case = _case(Bench(tmp_path), {f"{DESCRIBE} --tls-cert=a.pem": json.dumps(reported)})

    assert check_model(replace(case, tls=("--tls-cert=a.pem",))).result == "ok"


def test_two_models_are_a_failure_in_pdserves_own_message(tmp_path: Path) -> None:
    reported = {"instances": [_instance(), _instance(model="Qwen3")], "differences": ["model weights differ: a, b"]}

    verdict = check_model(_case(Bench(tmp_path), {DESCRIBE: json.dumps(reported)}))

    assert (verdict.result, verdict.message) == ("fail", "model weights differ: a, b")


def test_an_instance_that_refuses_us_is_a_failure(tmp_path: Path) -> None:
    reported = {"instances": [_instance(error="cluster secrets differ: a, b", refused=True)], "differences": []}

    verdict = check_model(_case(Bench(tmp_path), {DESCRIBE: json.dumps(reported)}))

    assert (verdict.result, verdict.message) == ("fail", "cluster secrets differ: a, b")
    assert verdict.next_step == "give every host the same cluster_secret"


def test_a_server_that_is_not_an_instance_fails_no_secret_check(tmp_path: Path) -> None:
    words = "127.0.0.1:8088: Received http2 header with status: 404"
    reported = {"instances": [_instance(error=words, refused=True)], "differences": []}

    verdict = check_model(_case(Bench(tmp_path), {DESCRIBE: json.dumps(reported)}))

    assert (verdict.result, verdict.message) == ("fail", words)
    assert verdict.next_step == "check which server listens there: server_port and NODE_PORTS are the instances' ports"


def test_before_the_start_no_models_are_compared(tmp_path: Path) -> None:
    silent = {"instances": [_instance(error="connection refused")], "differences": []}

    assert check_model(_case(Bench(tmp_path), {DESCRIBE: json.dumps(silent)})).message == "no instance answers"
    assert check_model(Bench(tmp_path / "b").case()).message == "no global table was given"


def test_the_last_output_line_is_shown_if_pdserve_fails(tmp_path: Path) -> None:
    words = "Traceback\npython: No module named pdserve\n"

    verdict = check_model(_case(Bench(tmp_path), {}, other=words))

    assert (verdict.result, verdict.message) == ("not here", "No module named pdserve")


def test_links_are_listed_with_their_speed(tmp_path: Path) -> None:
    reported = {"note": "", "links": [_link(), _link(decode="decode-1", transport="tcp", bytes_per_s=None)]}

    verdict = check_links(_case(Bench(tmp_path), {LINKS: json.dumps(reported)}))

    assert verdict.result == "ok"
    assert verdict.message == "prefill-0 to decode-0 shm 5.25 GB/s, prefill-0 to decode-1 tcp"


def test_a_pair_without_a_link_is_a_failure_and_a_fallback_a_warning(tmp_path: Path) -> None:
    case = _case(Bench(tmp_path / "a"), {LINKS: json.dumps({"links": [_link(error="no transport joins them")]})})
    worse = _case(Bench(tmp_path / "b"), {LINKS: json.dumps({"links": [_link(transport="tcp", fallbacks=2)]})})

    failed, warned = check_links(case), check_links(worse)

    assert (failed.result, failed.message) == ("fail", "prefill-0 to decode-0: no transport joins them")
    assert (warned.result, warned.message) == ("warn", "prefill-0 to decode-0: 2 fallbacks; the link now uses tcp")


def test_without_a_scheduler_no_link_is_measured(tmp_path: Path) -> None:
    case = _case(Bench(tmp_path), {}, other="pdserve links: nothing answers at http://127.0.0.1:9000\n")

    assert check_links(case).message == "nothing answers at http://127.0.0.1:9000"
    assert check_links(replace(case, tables=Bench(tmp_path / "b").case().tables)).message == "no scheduler is known"
