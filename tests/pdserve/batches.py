"""Files of requests for run-batch, and the command run on them as users run it, or in this process."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pdserve import cli

HOSTILE_FOLDER = ("engine.py", "batch/__init__.py", "wire.py", "scheduler/__init__.py")
"""Names of our packages, which a user's folder may contain."""
TIMEOUT_S = 500.0


def request(custom_id: str, url: str, /, **body: Any) -> dict[str, Any]:
    """Return a line for the model named `tiny`, greedy where it generates."""
    greedy = {"temperature": 0} if url.endswith("completions") else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny"} | greedy | body}


def chat(custom_id: str, system: str = "You are a helpful assistant.", /, **fields: Any) -> dict[str, Any]:
    """Return the chat that the guides print, of five tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello world!"}]
    limit = {} if {"max_tokens", "max_completion_tokens"} & fields.keys() else {"max_tokens": 5}
    return request(custom_id, "/v1/chat/completions", messages=messages, **limit, **fields)


def write(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write a file with one line for each entry; a text is written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an output."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_ids(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answered line without the values that differ between runs: ids and the time."""
    response = line["response"]
    if response is None:
        return {"custom_id": line["custom_id"], "error": line["error"]}
    body = {name: value for name, value in (response["body"] or {}).items() if name not in ("id", "created", "pdserve")}
    reported = {"status_code": response["status_code"], "body": body}
    return {"custom_id": line["custom_id"], "response": reported, "error": line["error"]}


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str


def run(folder: Path, *words: str | Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run `python WORDS` from `folder`, which contains files with names of our packages."""
    for name in HOSTILE_FOLDER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('imported from the current folder')\n")
    ended = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder,
        stdin=subprocess.DEVNULL, env=_without_proxies() | dict(env or {}),
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run_here(folder: Path, *words: str | Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run `pdserve run-batch WORDS` in this process, from `folder`: a process of its own costs half a second of CPU."""
    out, err = io.StringIO(), io.StringIO()
    environ = patch.dict(os.environ, _without_proxies() | dict(env or {}), clear=True)
    with contextlib.chdir(folder), environ, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(["run-batch", *map(str, words)])
        except SystemExit as ended:  # argparse's
            status = ended.code if isinstance(ended.code, int) else 1
    return Ended(status, out.getvalue(), err.getvalue())


def _without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


COMMAND = ("-m", "pdserve", "run-batch")
LOOPBACK = ("--allow-private-urls", "127.0.0.1/32")
NO_MODEL = ("--model", "/no/such/model")
WORDS = ("one", "two", "three", "four")
BATCH = [request(f"id-{word}", "/v1/completions", prompt=word) for word in WORDS]
CONTENT = "".join(json.dumps(line) + "\n" for line in BATCH).encode()
SAID = [f"said {word}" for word in WORDS]
"""The answers of the model of `loopback.py` to BATCH."""


def texts(output: bytes | str) -> list[str]:
    """Return the model's answers, line by line."""
    lines = [json.loads(line) for line in output.splitlines()]
    return [line["response"]["body"]["choices"][0]["text"] for line in lines]
