"""The guide's 1P1D with two devices per instance: four ranks as real processes, which answer as one rank does."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from engine.checkpoints.default_model import ensure_default_model
from engine.oracle import generate_greedy
from pdserve.run_folder import default_cache_dir
from tests.cluster.guide import GuideCluster, Process

pytestmark = [pytest.mark.cluster, pytest.mark.long]

FLAGS = ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16", "--max-model-len=256")
GUIDE = ("--tensor-parallel-size=2", "--max-num-seqs=256", "--max-num-batched-tokens", "256")
LINES = (
    "hello", "what is the capital of France?", "the quick brown fox jumps over the lazy dog " * 4, "how are you",
)  # fmt: skip
_WAIT_S = 300.0


def _complete(cluster: GuideCluster, prompt: str, max_tokens: int) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = cluster.client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def _expected(model: Path, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Plain transformers, decoded by the tokenizer of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    made = generate_greedy(model, ids, max_tokens, ignore_eos=True)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]


def _ranks(cluster: GuideCluster, name: str) -> list[psutil.Process]:
    below = cluster.processes[name].descendants()
    return [process for process in below if "engine.ranks.process" in process.cmdline()]


@pytest.fixture(scope="module")
def two_and_two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuideCluster]:
    folder = tmp_path_factory.mktemp("tp")
    with GuideCluster(folder, tiny_model, flags=(*FLAGS, *GUIDE)) as cluster:
        yield cluster.up()


@pytest.mark.covers("A8.113", "A8.117")
def test_four_ranks_answer_as_transformers_does(two_and_two: GuideCluster, tiny_model: Path) -> None:
    got = [_complete(two_and_two, line, 16) for line in LINES]

    assert got == _expected(tiny_model, LINES, 16)
    assert all(len(_ranks(two_and_two, name)) == 1 for name in ("prefill-0", "decode-0"))
    assert two_and_two.processes["prefill-0"].log.count("kv_link_up") >= 2
    two_and_two.wait_idle()


def test_each_rank_runs_on_the_cores_of_its_device(two_and_two: GuideCluster) -> None:
    for name in ("prefill-0", "decode-0"):
        cores = psutil.Process(two_and_two.processes[name].pid).cpu_affinity() or []
        (rank,) = _ranks(two_and_two, name)

        assert set(rank.cpu_affinity() or []) <= set(cores)
        assert f"2 ranks on cores {cores[0]}" in two_and_two.processes[name].log


def test_the_ranks_listen_only_on_loopback(two_and_two: GuideCluster) -> None:
    for name in ("prefill-0", "decode-0"):
        (rank,) = _ranks(two_and_two, name)
        ends = [end.ip for one in rank.net_connections("inet") for end in (one.laddr, one.raddr) if end]

        assert set(ends) <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [("4,5", "6", "shm"), ("4", "6,7", "shm"), ("4,5", "6,7", "process_group"), ("4,5", "6", "process_group")],
)
def test_prefill_and_decode_may_differ_in_ranks(
    tmp_path: Path, tiny_model: Path, prefill: str, decode: str, transport: str
) -> None:
    flags = (*FLAGS, f"--kv-transport={transport}")
    with GuideCluster(tmp_path, tiny_model, prefill=(prefill,), decode=(decode,), flags=flags) as cluster:
        cluster.up()

        assert [_complete(cluster, line, 12) for line in LINES[:2]] == _expected(tiny_model, LINES[:2], 12)
        cluster.wait_idle()


def test_a_killed_rank_ends_its_instance_at_once_with_its_name(two_and_two: GuideCluster) -> None:
    """The last test of that cluster."""
    (rank,) = _ranks(two_and_two, "decode-0")
    decode = _retire(two_and_two, "decode-0")

    rank.kill()

    assert decode.wait(_WAIT_S) == 1
    assert f"rank 1 of 2 (pid {rank.pid}) was killed by SIGKILL" in decode.log.splitlines()[-1]
    assert _have_ended([rank.pid])


def test_a_stuck_rank_ends_its_instance_within_the_steps_time(tmp_path: Path, tiny_model: Path) -> None:
    with GuideCluster(tmp_path, tiny_model, prefill=("4",), flags=(*FLAGS, "--rank-timeout=2")) as cluster:
        cluster.up()
        (rank,) = _ranks(cluster, "decode-0")
        decode = _retire(cluster, "decode-0")
        rank.send_signal(signal.SIGSTOP)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(cluster.client.post, "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 4})
            assert decode.wait(_WAIT_S) == 1

        assert f"rank 1 of 2 (pid {rank.pid}) is stopped by a signal: no sum over" in decode.log.splitlines()[-1]
        assert "within 2 s" in decode.log.splitlines()[-1]
        assert _have_ended([rank.pid])


def test_no_rank_outlives_its_instance(tmp_path: Path, tiny_model: Path) -> None:
    with GuideCluster(tmp_path, tiny_model, flags=FLAGS) as cluster:
        cluster.start("prefill-0")
        _wait_until_said(cluster.processes["prefill-0"], " serving ")
        (rank,) = _ranks(cluster, "prefill-0")

        cluster.kill("prefill-0")

        assert _have_ended([rank.pid])


@pytest.mark.timeout(1800)
def test_the_default_model_answers_a_hundred_prompts_as_one_rank_does(tmp_path: Path) -> None:
    model = ensure_default_model(default_cache_dir(os.environ), lambda words: None)
    prompts = [f"{line} Number {number}: {'and so on, ' * (number % 13)}" for number, line in enumerate(_lines(100))]
    flags = ("--dtype=float32", "--kv-cache-memory=256MiB", "--max-model-len=512")

    answers = {}
    for name, prefill, decode in (("two", "4,5", "6,7"), ("one", "4", "6")):
        folder = tmp_path / name
        folder.mkdir()
        with GuideCluster(folder, model, prefill=(prefill,), decode=(decode,), flags=flags) as cluster:
            cluster.up()
            with ThreadPoolExecutor(8) as pool:
                answers[name] = [*pool.map(lambda prompt: _complete(cluster, prompt, 32), prompts)]
            cluster.wait_idle()

    assert answers["two"] == answers["one"]
    assert answers["two"][:4] == _expected(model, prompts[:4], 32)


def _lines(count: int) -> list[str]:
    subjects = ("The sea", "A small town", "My grandmother", "The committee", "An old engine")
    verbs = ("was known for", "could not explain", "had always wanted", "remembered")
    objects = ("the winter of that year.", "a letter without a name.", "how to count.", "green bread.", "the key.")
    every = [f"{a} {b} {c}" for a in subjects for b in verbs for c in objects]
    return every[:count]


def _retire(cluster: GuideCluster, name: str) -> Process:
    """Return a process that is going to end with a status other than 0."""
    cluster.retired.append(cluster.processes.pop(name))
    return cluster.retired[-1]


def _wait_until_said(process: Process, words: str) -> None:
    deadline = time.monotonic() + 2 * _WAIT_S
    while words not in process.log:
        assert process.running, process.log
        assert time.monotonic() < deadline, process.log
        time.sleep(0.05)


def _have_ended(pids: Sequence[int]) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=_WAIT_S)
    return not alive
