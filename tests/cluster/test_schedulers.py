"""`pdserve up --schedulers 2`: both serve one port, which stays open while one restarts, and continue its streams."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.oracle import Oracle
from pdserve.client import Client
from pdserve.ports import free_ports
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from wire.errors import Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


def own_client(pdserve: Pdserve, name: str) -> Client:
    return Client(f"http://{pdserve.record(name).address}", timeout_s=DEADLINE_S)


def wait_restarted(pdserve: Pdserve, name: str, pid: int) -> None:
    """Return when another process has this name and serves at its own port."""
    deadline = time.monotonic() + DEADLINE_S
    while pdserve.record(name).pid == pid or not _is_ready(own_client(pdserve, name)):
        assert time.monotonic() < deadline, pdserve("logs", "supervisor").stdout
        time.sleep(0.02)


def _is_ready(client: Client) -> bool:
    try:
        return client.get("/ready").status == 200
    except Unavailable:
        return False


def states(pdserve: Pdserve) -> dict[str, str]:
    rows = [line.split() for line in pdserve("status").stdout.splitlines()[2:]]
    return {row[0]: row[4] for row in rows if row and row[0].startswith("scheduler-")}


def test_two_schedulers_serve_one_port_and_one_takes_over(pdserve: Pdserve) -> None:
    assert pdserve.up("--schedulers", "2").returncode == 0
    names = ("scheduler-0", "scheduler-1")
    answers = [own_client(pdserve, name).post("/v1/completions", ASK).json() for name in names]
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1, texts
    assert states(pdserve) == dict.fromkeys(names, "ready")

    for name in names:
        dead = pdserve.record(name)
        os.kill(dead.pid, signal.SIGKILL)
        for _ in range(20):  # the other one takes them, or the spare that replaces it
            answer = pdserve.client_for_long_answers.post("/v1/completions", ASK).json()
            assert answer["choices"][0]["text"] in texts
        assert pdserve("role", "decode-0", "decode").returncode == 0
        wait_restarted(pdserve, name, dead.pid)
    assert states(pdserve) == dict.fromkeys(names, "ready")
    assert "pdserve_instance_info" in own_client(pdserve, names[1]).get("/metrics").body.decode()


def test_a_stopped_scheduler_keeps_no_client_of_the_port_waiting(pdserve: Pdserve) -> None:
    assert pdserve.up("--schedulers", "2").returncode == 0
    stopped = pdserve.record("scheduler-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        for _ in range(10):
            assert pdserve.client_for_long_answers.post("/v1/completions", ASK).status == 200
        assert states(pdserve) == {"scheduler-0": "silent", "scheduler-1": "ready"}
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert own_client(pdserve, "scheduler-0").post("/v1/completions", ASK).status in (200, 503)
    wait_restarted(pdserve, "scheduler-0", 0)


PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
PROMPT = list(range(5, 25))
COUNT = 300
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
STREAMED = {**LONG, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
KEEP = {"X-Pdserve-Keep-Stream": "true"}
Events = list[dict[str, Any]]


class Reader:
    """Reads a stream in a thread, until it ends or breaks."""

    def __init__(self, method: str, url: str, **request: Any) -> None:
        self.events: Events = []
        self.status, self.stream_id, self.end = 0, "", ""
        self._changed, self._leaves = threading.Condition(), False
        self._thread = threading.Thread(target=self._read, args=(method, url), kwargs=request, daemon=True)
        self._thread.start()

    def wait(self, num_events: int) -> Events:
        """Return the first so many events."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= num_events or self.end, DEADLINE_S)
        return self.events[:num_events]

    def leave(self) -> None:
        """Disconnect after the next event."""
        self._leaves = True

    def whole(self) -> Events:
        """Return all events once it has ended."""
        self._thread.join(DEADLINE_S)
        assert self.end
        return self.events

    def _read(self, method: str, url: str, **request: Any) -> None:
        try:
            with httpx.stream(method, url, timeout=DEADLINE_S, trust_env=False, **request) as answer:
                self.status, self.stream_id = answer.status_code, answer.headers.get("x-pdserve-stream", "")
                for line in answer.iter_lines():
                    if self._leaves:
                        break
                    if line.startswith("data: {"):
                        self._add(json.loads(line.removeprefix("data: ")))
                    elif line == "data: [DONE]":
                        self.end = "done"
            self.end = self.end or "ended"
        except httpx.TransportError as error:
            self.end = f"broken: {error}"
        with self._changed:
            self._changed.notify_all()

    def _add(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()


def url_of(pdserve: Pdserve, name: str) -> str:
    return f"http://{pdserve.record(name).address}"


def token_ids(events: Events) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def assert_whole(events: Events, wanted: list[int]) -> None:
    """Assert that the parts of a stream are all of it, with its usage once."""
    assert "error" not in events[-1], events[-1]
    assert token_ids(events) == wanted
    usages = [event["usage"] for event in events if event.get("usage")]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [(len(PROMPT), COUNT)]
    assert len({event["id"] for event in events}) == 1


@pytest.fixture
def slow(pdserve: Pdserve, slow_fake_model: Path) -> Pdserve:
    """The command with a model whose streams last for some seconds."""
    pdserve.model = slow_fake_model
    return pdserve


def begun(pdserve: Pdserve, num_events: int) -> Reader:
    """Begin a stream at the first scheduler, and return once it has so many events."""
    reader = Reader("POST", url_of(pdserve, "scheduler-0") + "/v1/completions", json=STREAMED, headers=KEEP)
    assert len(reader.wait(num_events)) == num_events, reader.events
    return reader


def continued(pdserve: Pdserve, stream_id: str, after: int, at: str = "scheduler-1") -> Reader:
    return Reader("GET", f"{url_of(pdserve, at)}/v1/streams/{stream_id}?after={after}")


def undisturbed(pdserve: Pdserve) -> list[int]:
    """Return the tokens of the same request without a fault."""
    answer = own_client(pdserve, "scheduler-1").post("/v1/completions", {**LONG, "return_token_ids": True}).json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_a_stream_equals_the_oracle_after_the_death_of_its_owner(pdserve: Pdserve, tiny_model: Path) -> None:
    wanted = Oracle(tiny_model, "float32").generate_greedy([PROMPT], COUNT, ignore_eos=True)[0]
    pdserve.model, pdserve.engine = tiny_model, ENGINE_FLAGS
    assert pdserve.up("--schedulers", "2").returncode == 0, pdserve("logs", "supervisor").stdout
    before = begun(pdserve, 5)
    os.kill(pdserve.record("scheduler-0").pid, signal.SIGKILL)
    had = before.whole()
    after = continued(pdserve, before.stream_id, len(had))

    assert before.end.startswith("broken"), before.end
    assert_whole(had + after.whole(), wanted)


def test_a_stopped_owner_that_runs_again_ends_its_client(slow: Pdserve) -> None:
    assert slow.up("--schedulers", "2").returncode == 0
    wanted = undisturbed(slow)
    before = begun(slow, 5)
    stopped = slow.record("scheduler-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        had = list(before.events)
        after = continued(slow, before.stream_id, len(had))
        after.wait(5)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    whole = had + after.whole()

    assert_whole(whole, wanted)
    assert before.whole()[-1]["error"]["code"] == 409
    assert (before.end, after.end) == ("ended", "done")
    for name in ("scheduler-0", "scheduler-1"):  # and it serves
        assert own_client(slow, name).post("/v1/completions", ASK).status == 200
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
        assert client.get(f"{url_of(slow, 'scheduler-0')}/v1/streams/{'0' * 32}").status_code == 404


def test_an_owner_stopped_beyond_its_lease_computes_nothing_again(slow: Pdserve) -> None:
    assert slow.up("--schedulers", "2", "--orphan-limit", "60", "--stall-timeout", "60").returncode == 0
    wanted = undisturbed(slow)
    before = begun(slow, 5)
    stopped = slow.record("scheduler-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "session_over" not in slow.folder.log("decode-0").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    events = before.whole()

    assert_whole(events, wanted)  # the owner got its orphan back
    assert "stream_reclaimed" in slow.folder.log("scheduler-0").read_text()
    assert "prompt_retried" not in slow.folder.log("scheduler-0").read_text()


def test_a_repeated_request_continues_the_run_of_a_dead_scheduler(slow: Pdserve) -> None:
    assert slow.up("--schedulers", "2").returncode == 0
    wanted = undisturbed(slow)
    asked = {**LONG, "return_token_ids": True}

    def post(name: str, **changes: Any) -> httpx.Response:
        headers = {"Idempotency-Key": "order-7"}
        with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
            return client.post(url_of(slow, name) + "/v1/completions", json=asked | changes, headers=headers)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(post, "scheduler-0")
        wait_decoded(slow)
        joined = threads.submit(post, "scheduler-1")
        assert post("scheduler-1", max_tokens=3).status_code == 422
        os.kill(slow.record("scheduler-0").pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            first.result(DEADLINE_S)
        answer = joined.result(DEADLINE_S)
    again = post("scheduler-1")

    assert answer.json()["choices"][0]["token_ids"] == wanted
    assert (again.content, again.headers["x-pdserve-replayed"]) == (answer.content, "true")
    assert _metric(slow, "scheduler-1", "pdserve_requests_run_again_total") == 0
    assert "prompt_retried" not in slow.folder.log("scheduler-1").read_text()


def test_a_retry_of_the_official_client_runs_nothing_twice(slow: Pdserve) -> None:
    assert slow.up("--schedulers", "2").returncode == 0
    wanted = undisturbed(slow)
    http = openai.DefaultHttpxClient(trust_env=False)
    with (
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{slow.port}/v1", api_key="none", max_retries=8, http_client=http
        ) as client,
        ThreadPoolExecutor() as threads,
    ):
        asked = threads.submit(
            client.completions.create, model="tiny", prompt=PROMPT, max_tokens=COUNT, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True}, extra_headers={"Idempotency-Key": "order-7"},
        )  # fmt: skip
        wait_decoded(slow)
        names = {"scheduler-0", "scheduler-1"}
        (owner,) = (name for name in names if _metric(slow, name, "pdserve_requests_inflight"))
        os.kill(slow.record(owner).pid, signal.SIGKILL)
        answer = asked.result(DEADLINE_S)

    assert answer.choices[0].model_dump()["token_ids"] == wanted
    (other,) = names - {owner}
    assert _metric(slow, other, "pdserve_requests_run_again_total") == 0
    assert slow.folder.log("decode-0").read_text().count("session_over") == 1


@contextmanager
def stream_proxy(pdserve: Pdserve) -> Iterator[str]:
    """Run `pdserve door` in front of the shared port, and return its URL."""
    (port,) = free_ports(1)
    command = [*pdserve.program, "door", "--port", str(port), "--to", f"http://127.0.0.1:{pdserve.port}"]
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not _is_ready(Client(f"http://127.0.0.1:{port}", timeout_s=DEADLINE_S)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert process.wait(DEADLINE_S) == 0


def test_no_stream_through_the_proxy_notices_dead_schedulers(slow: Pdserve) -> None:
    assert slow.up("--schedulers", "2", "--orphan-limit", "3600").returncode == 0
    wanted = undisturbed(slow)
    with stream_proxy(slow) as url:
        readers = [Reader("POST", f"{url}/v1/completions", json=STREAMED) for _ in range(8)]
        for number, name in ((5, "scheduler-0"), (20, "scheduler-1"), (100, "scheduler-0")):
            for reader in readers:
                reader.wait(number)
            dead = slow.record(name)
            os.kill(dead.pid, signal.SIGKILL)
            wait_restarted(slow, name, dead.pid)
        for reader in readers:
            assert_whole(reader.whole(), wanted)
            assert reader.end == "done"
        left = Reader("POST", f"{url}/v1/completions", json=STREAMED)
        left.wait(5)
        left.leave()
        deadline = time.monotonic() + DEADLINE_S
        while _num_running(slow):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _num_running(pdserve: Pdserve) -> float:
    """Return how many sequences the instances have."""
    return _metric(pdserve, "scheduler-1", "pdserve_running{")


def _metric(pdserve: Pdserve, name: str, begin: str) -> float:
    """Return the sum of a scheduler's samples that begin with this text."""
    page = own_client(pdserve, name).get("/metrics").body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(begin))


def wait_decoded(pdserve: Pdserve) -> None:
    """Return when the decode instance has a sequence."""
    deadline = time.monotonic() + DEADLINE_S
    while not _metric(pdserve, "scheduler-1", 'pdserve_running{instance="decode'):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("num_schedulers", [1, 2])
def test_the_documented_client_loses_nothing_when_schedulers_die(slow: Pdserve, num_schedulers: int) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    documented: dict[str, Any] = {}
    exec(code, documented)
    several = ("--schedulers", str(num_schedulers)) if num_schedulers > 1 else ()
    assert slow.up(*several).returncode == 0
    names = [one.name for one in slow.state.processes if one.name.startswith("scheduler")]
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{slow.port}/v1", api_key="none", max_retries=8, http_client=http
    ) as client:
        whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        chunks = []
        for number, chunk in enumerate(documented["chat"](client, **asked)):
            chunks.append(chunk)
            if number == 5:
                for name in names:
                    os.kill(slow.record(name).pid, signal.SIGKILL)

    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [token for choice in choices for token in getattr(choice, "token_ids", ())] == whole.choices[0].token_ids
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
