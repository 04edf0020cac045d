"""The command over a real model, killed at 20 random moments, ends with the file of an undisturbed run."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes.failpoints import VARIABLE
from tests.batch.scripted import plain, write_lines
from tests.batch.test_kill import CLONE, KILLED
from tests.engine.tiny_models import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.cluster]
NUM_LINES = 80
MAX_ANSWERED = 5  # of one run that is killed
DEADLINE_S = 300.0
WORDS = ("the quick brown fox", "hello, how are you?", "what is the capital of France?", "jumps over")


def _lines() -> Iterator[dict[str, Any]]:
    for n in range(NUM_LINES):
        text = " ".join(WORDS[(n + i) % len(WORDS)] for i in range(n % 5 + 1))
        url, body = (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 8 + n % 9}),
            ("/v1/completions", {"prompt": text, "max_tokens": 4 + n % 5}),
            ("/v1/embeddings", {"input": text}),
            ("/v1/score", {"text_1": text, "text_2": list(WORDS)}),
            ("/bad_url", {}),
        )[n % 5]
        fields = {"model": "tiny", **body} | ({"temperature": 0} if "max_tokens" in body else {})
        yield {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": fields}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


def _run(folder: Path, model: Path, failpoint: str = "") -> int:
    command = [sys.executable, "-m", "pdserve.entrypoints.openai.run_batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--max-inflight", "6"]
    environment = os.environ | {VARIABLE: failpoint, "PYTHONPATH": str(CLONE)}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode in (0, KILLED), ran.stderr
    return ran.returncode


def _write_input(folder: Path) -> Path:
    write_lines(folder / "in.jsonl", _lines())
    return folder


def _compared(folder: Path) -> list[dict[str, Any]]:
    """Return each line without what differs from run to run: ids and times."""
    lines = plain(folder / "out.jsonl")
    for line in lines:
        for name in ("id", "created"):
            line["response"]["body"].pop(name, None)
    return lines


@pytest.fixture(scope="module")
def unkilled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = _write_input(tmp_path_factory.mktemp("unkilled"))
    assert _run(folder, model) == 0
    assert sum(line["error"] is None for line in _compared(folder)) == NUM_LINES * 4 // 5
    return folder


def _points() -> Iterator[tuple[str, int]]:
    """Yield 20 random moments, those at the end last, and the number of lines answered by then."""
    chance, done = random.Random(20), 0
    for _ in range(16):
        name, hit = chance.choice(["batch.before_write", "batch.after_write"]), chance.randint(1, MAX_ANSWERED)
        done += hit - (name == "batch.before_write")
        yield f"{name}=kill9@{hit}", done
    for _ in range(4):
        yield f"{chance.choice(['batch.before_rename', 'batch.after_rename'])}=kill9", NUM_LINES


def test_a_run_killed_20_times_writes_the_same_file(
    tmp_path: Path, model: Path, unkilled: Path
) -> None:  # fmt: skip
    folder = _write_input(tmp_path)
    for failpoint, done in _points():
        assert _run(folder, model, failpoint) == KILLED
        assert len((folder / "out.jsonl.journal").read_bytes().splitlines()) == 1 + done, failpoint

    assert _run(folder, model) == 0

    assert _compared(folder) == _compared(unkilled)
    assert sorted(os.listdir(folder)) == ["in.jsonl", "out.jsonl", "out.jsonl.asked"]
