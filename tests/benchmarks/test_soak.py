"""The soak test: what it checks on a cluster, and that it runs with the fake engine."""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import soak
from benchmarks.soaking.requests import SoakClient
from benchmarks.soaking.snapshots import ProcessSample, growth, not_idle
from pdserve.client import Sample

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
COUNTS = {"received": 9, "completed": 6, "failed": 1, "cancelled": 2, "rejected": 5}


def _page(**more: float) -> Mock:
    counts = {f"pdserve_requests_{how}_total": float(count) for how, count in COUNTS.items()}
    samples = [Sample(name, {"instance": "decode-0"}, value) for name, value in (counts | more).items()]
    return Mock(metrics=Mock(return_value=tuple(samples)))


def _row(**differs: object) -> dict[str, Any]:
    row = {
        "outcomes": {"answered": 5}, "not_idle": {}, "left_behind": {"shared_memory": [], "processes": []},
        "growth": {"decode-0": [{"resident_mib": 1, "descriptors": 0, "threads": 0}]},
    }  # fmt: skip
    return row | differs


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    sizes = (90, 5, 10, 12, 13, 14, 30, 30)
    looks = [ProcessSample("decode-0", (1, 1), size, 7, 3) for size in sizes]

    assert growth(looks) == {"resident_bytes": 19, "descriptors": 0, "threads": 0}


def test_leaks_and_unfinished_requests_are_named() -> None:
    assert not_idle(_page(pdserve_running=0.0)) == {}
    assert not_idle(_page(pdserve_running=2.0)) == {"pdserve_runningdecode-0": 2.0}
    assert not_idle(_page(pdserve_requests_received_total=10.0)) == {"requests received and not ended": 1.0}


@pytest.mark.parametrize(
    ("differs", "broken"),
    [
        ({}, None),
        ({"outcomes": {"wrong": 1}}, "every answer the same"),
        ({"outcomes": {"unfinished": 1}}, "every request ended"),
        ({"outcomes": {"failed": 1}}, "no error without a fault"),
        ({"not_idle": {"pdserve_running": 1.0}}, "idle afterwards"),
        ({"growth": {"decode-0": [{"resident_mib": 65, "descriptors": 0, "threads": 0}]}}, "no growth"),
        ({"growth": {"decode-0": [{"resident_mib": 0, "descriptors": 13, "threads": 0}]}}, "no growth"),
        ({"growth": {"decode-0": [{"resident_mib": 0, "descriptors": 0, "threads": 2}]}}, "no growth"),
        ({"left_behind": {"shared_memory": ["psm_1"], "processes": []}}, "nothing left behind"),
    ],
)
def test_each_guarantee_can_be_violated(differs: dict[str, object], broken: str | None) -> None:
    held = soak.holds(_row(**differs), argparse.Namespace(kill_every=0.0, freeze_every=0.0, most_growth=64, clients=12))

    assert [promise for promise, kept in held.items() if not kept] == ([] if broken is None else [broken])


def test_a_different_answer_to_the_same_body_is_wrong() -> None:
    client = SoakClient(Mock(), "model", random.Random(0), 1.0)

    assert client.same("greedy 1", "a") == ("answered", "")
    assert client.same("greedy 2", "b") == ("answered", "")
    assert client.same("greedy 1", "b")[0] == "wrong"


@pytest.mark.parametrize(("status", "how"), [(400, "wrong"), (404, "wrong"), (429, "failed"), (503, "failed")])
def test_a_refused_good_request_is_a_fault_and_a_full_server_is_not(status: int, how: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=status)

    async def outcomes() -> set[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
            client = SoakClient(session, "model", random.Random(0), 10.0)
            return {(await client.ask(kind)).how for kind in ("greedy", "choices")}

    assert asyncio.run(outcomes()) == {how}


@pytest.mark.long
@pytest.mark.cluster
def test_a_cluster_is_soaked_and_ended(tmp_path: Path) -> None:
    command = [
        sys.executable, str(SCRIPT), "--minutes", "0.1", "--prefill", "1", "--decode", "1", "--up-flags=--engine fake",
        "--only", "greedy", "leaves", "leaves_unasked", "bad",
    ]  # fmt: skip

    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, errors = running.communicate(timeout=300)
        finally:
            running.terminate()  # it stops what it started; killing it would leave a cluster behind

    row = json.loads(output.splitlines()[-1])
    assert running.returncode == 0, (row, errors)
    assert set(row["outcomes"]) >= {"answered", "left", "refused"}
    assert all(row["held"].values())
