"""LLM in users' scripts, as real processes: as printed, beside modules of the same names, interrupted, killed."""

import ast
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.processes import POLL_S
from pdserve.run_folder import ProcessRecord, RunFolder
from tests.cluster.conftest import fake_model, slow_fake_model  # noqa: F401 - fixtures
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.hub.fake_hub import FakeHub
from tests.pdserve.hub.printed_models import OPT, hub_environment

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "offline_inference.py"
WAIT_S = 300
PRINTED = """
from vllm import LLM, SamplingParams
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return kept | {"TMPDIR": str(folder)}


def test_the_example_is_the_printed_script() -> None:
    example = ast.parse(EXAMPLE.read_text(encoding="utf-8")).body[1:]
    printed = ast.parse(PRINTED.replace("vllm", "pdserve")).body

    assert list(map(ast.dump, example)) == list(map(ast.dump, printed))


@pytest.mark.long
@pytest.mark.covers("A6.77", "A6.79")
def test_the_printed_script_runs_beside_modules_of_our_names(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    for file in (tmp_path / "engine.py", tmp_path / "batch" / "__init__.py", tmp_path / "scheduler.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise SystemExit('a module of the user was run')\n")
    model = make_tiny_model("opt", tmp_path / "opt")
    with FakeHub({OPT: model}) as hub:
        ended = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
            env=environment(tmp_path) | hub_environment(hub, tmp_path),
        )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [ast.literal_eval(line.partition("Prompt: ")[2].partition(", Generated text: ")[0]) for line in lines] == [
        "Hello, my name is", "The president of the United States is", "The capital of France is", "The future of AI is",
    ]  # fmt: skip
    assert all(ast.literal_eval(line.partition(", Generated text: ")[2]) for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "flags", "starts"),
    [
        ("chat.py", ("--max_tokens", "4", "--temperature", "0"), ["answer: "] * 11),
        ("chat.py", ("--max-tokens=2", "--chat-template-path", "chat.jinja"), ["answer: "] * 11),
        ("vectors.py", (), ["prompt: ", "Embeddings: ["] * 3 + ["score: "] * 2),
    ],
)
def test_the_examples_with_flags_run(tmp_path: Path, script: str, flags: tuple[str, ...], starts: list[str]) -> None:
    """Like vLLM's for chats, vectors and scores: the flags of LLM, and those of the script."""
    model = make_tiny_model("llama", tmp_path / "llama")
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    path = EXAMPLES / "offline_inference" / script
    ended = subprocess.run(
        [sys.executable, path, "--model", model, "--dtype", "float32", "--kv_cache_memory=16MiB", *flags],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path),
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == len(starts)
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * len(starts)


_INTERRUPTED = """
import sys
from pdserve import LLM, SamplingParams

class Bar:
    format_dict = {}
    def __init__(self, **options): pass
    def update(self, count): print("one is done", flush=True)
    def close(self): pass

llm = LLM(sys.argv[1], engine="fake", **eval(sys.argv[2]))
print("ready", flush=True)
params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, *[450] * 40)]
try:
    llm.generate([[7, 8, 9]] * 41, params, use_tqdm=Bar)
except KeyboardInterrupt:
    print("interrupted", flush=True)
(answer,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3, ignore_eos=True))
print(len(answer.outputs[0].token_ids), flush=True)
running = [one.value for one in llm.get_metrics() if one.name == "vllm:num_requests_running"]
print(sum(running), flush=True)
sys.stdin.read()
"""


@contextmanager
def script(folder: Path, model: Path, keywords: str) -> "Iterator[subprocess.Popen[str]]":
    """Run the script above in its own session, as a terminal does, until it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(model), keywords], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(folder),
    ) as process:  # fmt: skip
        assert _line(process) == "ready", process.communicate()
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _processes(folder: Path, *, whole: bool = True) -> list[ProcessRecord]:
    """The processes of a pair whose folder is in `folder`."""
    (place,) = folder.glob("pdserve-llm-*")
    state = RunFolder(place).read()
    assert state is not None
    assert state.supervisor is not None
    assert not whole or [process.role for process in state.processes] == ["prefill", "decode", "scheduler"]
    return [state.supervisor, *state.processes]


@pytest.mark.parametrize(
    "keywords",
    [pytest.param("{}", id="local"), pytest.param("{'prefill': 1, 'decode': 1}", id="pair", marks=pytest.mark.long)],
)
def test_ctrl_c_cancels_the_run_and_leaves_a_working_llm(
    keywords: str,
    tmp_path: Path,
    slow_fake_model: Path,  # noqa: F811
) -> None:
    with script(tmp_path, slow_fake_model, keywords) as process:
        process_fds = [os.pidfd_open(one.pid) for one in _processes(tmp_path)] if "prefill" in keywords else []
        assert _line(process) == "one is done"
        os.killpg(process.pid, signal.SIGINT)

        assert [_line(process) for _ in range(3)] == ["interrupted", "3", "0.0"], process.stderr
        _, noise = process.communicate(timeout=WAIT_S)
        assert (process.returncode, noise) == (0, "")
    _all_end(process_fds)
    assert list(tmp_path.glob("pdserve-llm-*")) == []


@pytest.mark.long
def test_a_killed_script_leaves_no_process_and_no_folder(tmp_path: Path, fake_model: Path) -> None:  # noqa: F811
    with script(tmp_path, fake_model, "{'prefill': 1, 'decode': 1}") as process:
        process_fds = [os.pidfd_open(one.pid) for one in _processes(tmp_path)]
        assert list(tmp_path.rglob("cluster_secret"))
        process.kill()

    _all_end(process_fds)
    assert list(tmp_path.glob("pdserve-llm-*")) == []


@pytest.mark.long
def test_ctrl_c_while_a_pair_starts_leaves_nothing(tmp_path: Path, fake_model: Path) -> None:  # noqa: F811
    (tmp_path / "work").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(fake_model), "{'prefill': 1}"], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(tmp_path / "work"),
    ) as process:  # fmt: skip
        deadline = time.monotonic() + WAIT_S
        while not list((tmp_path / "work").glob("pdserve-llm-*/state.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        process_fds = [os.pidfd_open(one.pid) for one in _processes(tmp_path / "work", whole=False)]
        os.killpg(process.pid, signal.SIGINT)
        output, noise = process.communicate(timeout=WAIT_S)

    assert "ready" not in output
    assert noise.endswith("KeyboardInterrupt\n")
    _all_end(process_fds)
    assert list((tmp_path / "work").glob("pdserve-llm-*")) == []


_UNCAUGHT = """
import os, signal, sys
from pdserve import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu")
if "caught" in sys.argv:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        llm.generate("a")
    except KeyboardInterrupt:
        sys.exit(3)
os.kill(os.getpid(), signal.SIGINT)
llm.generate("a")
"""


@pytest.mark.long
@pytest.mark.parametrize(("words", "status"), [([], -signal.SIGINT), (["caught"], 3)])
def test_a_script_that_does_not_catch_ctrl_c_exits_by_it(words: list[str], status: int, tmp_path: Path) -> None:
    model = make_tiny_model("opt", tmp_path / "opt")
    ended = subprocess.run(
        [sys.executable, "-c", _UNCAUGHT, str(model), *words], capture_output=True, text=True, timeout=WAIT_S,
        env=environment(tmp_path),
    )  # fmt: skip

    assert ended.returncode == status, "of SIGINT, which a shell says as 130"
    assert ended.stderr.endswith("KeyboardInterrupt\n") is (not words)


def _all_end(process_fds: list[int]) -> None:
    for process_fd in process_fds:
        assert select.select([process_fd], [], [], WAIT_S)[0]
        os.close(process_fd)
