"""Lines 81, 98, 110, 115, 116, 139, 141 and 142 of the checklist, on clusters of real processes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.readiness import check_ready
from scheduler import config
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import START_SERVERS, START_TIMEOUT_S, GuideCluster, Process, Tables, generate
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

FAKE = ("--engine=fake",)
RANKTABLE = Path(sys.executable).with_name("ranktable")
GEN = "ranktable gen --prefill-server-list 4,5 --decode-server-list 6,7"


def _body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def _printed(message: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return the environment and the flags of each start command that gen printed, by its end."""
    lines = {}
    for line in message.splitlines():
        if "start_servers.sh" in line:
            command, _, name = line.partition("  # ")
            words = shlex.split(command)
            at = words.index("sh")
            assert Path(words[at + 1]) == START_SERVERS
            lines[name.partition(",")[0]] = (dict(word.split("=", 1) for word in words[:at]), words[at + 2 :])
    return lines


@pytest.mark.covers("A10.139")
@pytest.mark.long
def test_gen_and_the_start_commands_it_prints_lead_to_a_cluster(tmp_path: Path, fake_model: Path) -> None:
    gen = shlex.split(GEN.replace("ranktable", shlex.quote(str(RANKTABLE)), 1))
    done = subprocess.run(gen, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=True)
    tables = Tables(next(tmp_path.glob("global_ranktable_*.json")), tuple(sorted(tmp_path.glob("local_*"))))
    cluster = GuideCluster(tmp_path, fake_model, tables=tables)
    port_by_guide = dict(zip(("8088", "8089", "9000"), map(str, (*cluster.ports, cluster.port)), strict=True))

    def changed(text: str) -> str:
        """The guide's ports may be in use here, and the model is ours; everything else stays as printed."""
        return re.sub(r"\b(8088|8089|9000)\b", lambda match: port_by_guide[match[1]], text).replace(
            "--model=MODEL", f"--model={fake_model}"
        )

    with cluster:
        for name, (env, flags) in _printed(done.stdout).items():
            typed = [changed(flag) for flag in flags]
            environ = {variable: changed(value) for variable, value in env.items()}
            cluster.processes[name] = Process(tmp_path / f"{name}.log", environ, [*typed, *FAKE])
        cluster.wait_ready()
        reply = cluster.client.post("/v1/completions", _body(model=str(fake_model)))
        names = list(cluster.processes)
        cluster.wait_idle()

    assert names == ["prefill-0", "decode-0", "scheduler"]
    assert [path.name.rpartition("_")[2] for path in tables.local_paths] == ["45.json", "67.json", "host.json"]
    assert reply.status == 200, reply.body


@pytest.mark.covers("A10.141", "A10.142")
def test_one_launcher_is_one_process_and_only_the_scheduler_serves(
    fake_cluster: GuideCluster,
) -> None:
    processes = {name: psutil.Process(process.pid) for name, process in fake_cluster.processes.items()}

    assert {tuple(one.cmdline()[1:4]) for one in processes.values()} == {("-P", "-m", "pdserve.launch")}
    assert len({one.pid for one in processes.values()}) == 3
    assert config.parse(["--model=m"]).engine.port == 9000
    assert fake_cluster.client.post("/v1/completions", _body()).status == 200
    for port in fake_cluster.ports:
        with pytest.raises(Unavailable):
            Client(f"http://127.0.0.1:{port}").get("/v1/models")


@pytest.mark.covers("A11.16", "A7.98")
@pytest.mark.long
def test_a_different_global_table_ends_the_scheduler_naming_both(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        other = generate(tmp_path / "other", ("4,5", "8"), ("6,7",), (*cluster.ports, 65000))
        cluster.start("prefill-0")
        cluster.start("decode-0", env={"GLOBAL_RANK_TABLE_FILE_PATH": str(other.global_path)})

        scheduler = cluster.start("scheduler")
        status = scheduler.wait()
        del cluster.processes["scheduler"]

    assert status == 2
    assert re.search(
        r": decode-0 .* another global table: digest \w+ there, \w+ in the scheduler", scheduler.log.splitlines()[-1]
    )


@pytest.mark.covers("A8.115")
@pytest.mark.long
def test_a_scheduler_names_missing_instances_at_its_deadline(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.start("prefill-0")
        scheduler = cluster.start("scheduler", flags=("--startup-timeout=1",))
        status = scheduler.wait()
        del cluster.processes["scheduler"]

    last = scheduler.log.splitlines()[-1]
    assert status == 2
    assert "--startup-timeout 1" in last
    assert "decode-0" in last


@pytest.mark.covers("A8.110")
@pytest.mark.long
def test_concurrent_sequences_stay_within_the_limit_and_all_finish(tmp_path: Path, slow_fake_model: Path) -> None:
    with GuideCluster(tmp_path, slow_fake_model, flags=(*FAKE, "--max-num-seqs=2")) as cluster:
        cluster.up()
        running: list[float] = []
        with ThreadPoolExecutor(5) as pool:
            bodies = [_body(prompt=[5, number], max_tokens=60) for number in range(5)]
            requests = [pool.submit(cluster.client.post, "/v1/completions", body) for body in bodies]
            while not all(one.done() for one in requests):
                running += [sample.value for sample in cluster.gauge("pdserve_running")]
        statuses = [one.result().status for one in requests]

    assert statuses == [200] * 5
    assert max(running) == 2


@contextmanager
def _serve_combined(folder: Path, model: Path) -> Iterator[Client]:
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdserve", "serve", str(model), f"--port={port}", "--served-model-name=tiny"]
    client = Client(f"http://127.0.0.1:{port}", timeout_s=300.0)
    with (folder / "serve.log").open("wb") as log, subprocess.Popen(
        [*command, *ENGINE_FLAGS], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            for _ in range(int(START_TIMEOUT_S / 0.1)):
                if server.poll() is not None or check_ready(client)[0]:
                    break
                with pytest.raises(subprocess.TimeoutExpired):
                    server.wait(0.1)
            assert check_ready(client)[0], (folder / "serve.log").read_text()
            yield client
        finally:
            server.kill()


def _fields(number: int) -> dict[str, object]:
    """A hundred different requests: greedy or seeded, one choice or three, with and without stop strings, streamed."""
    sampling: dict[str, object] = {"temperature": 0} if number % 3 else {"temperature": 1.2, "seed": number}
    if number % 3 == 0 and number % 2 == 0:
        sampling["n"] = 3
    if number % 4 == 1:
        sampling["stop"] = ["e", "the"]
    return {"prompt": [3 + (7 * number + 5 * at) % 200 for at in range(1 + number)], **sampling}


def _answer(client: Client, number: int) -> dict[int, tuple[str, str]]:
    """Return text and finish_reason by choice; every fifth request is streamed."""
    body = _body(max_tokens=16, **_fields(number))
    if number % 5:
        reply = client.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        events = [json.loads(reply.body)]
    else:
        events = list(client.stream("/v1/completions", body))
    answer: dict[int, tuple[str, str]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, reason = answer.get(choice["index"], ("", ""))
        answer[choice["index"]] = (text + choice["text"], choice["finish_reason"] or reason)
    return answer


@pytest.mark.covers("A8.116")
@pytest.mark.long
def test_a_hundred_answers_equal_those_of_one_process(tmp_path: Path, tiny_model: Path) -> None:
    with GuideCluster(tmp_path, tiny_model, prefill=("4",), decode=("6",), flags=ENGINE_FLAGS) as cluster:
        cluster.up()
        with _serve_combined(tmp_path, tiny_model) as whole, ThreadPoolExecutor(4) as pool:
            expected = list(pool.map(lambda number: _answer(whole, number), range(100)))
            got = list(pool.map(lambda number: _answer(cluster.client, number), range(100)))
        cluster.wait_idle()
        (moved,) = cluster.gauge("pdserve_kv_handoff_bytes_total")

    assert got == expected
    assert {reason for answer in got for _, reason in answer.values()} == {"length", "stop"}
    assert {len(answer) for answer in got} == {1, 3}
    assert moved.value > 0
