"""lm-eval: log probabilities and texts, equal to those of its own `hf` model, and chats."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("missing tool: lm-eval (pip install 'pdserve[clients]')", allow_module_level=True)

QUESTIONS = [
    {"question": "the quick brown fox jumps over", "choices": [" the lazy dog", " a red hen", " nothing"], "answer": 0},
    {"question": "what is the capital of", "choices": [" France?", " hello", " foxes and dogs"], "answer": 0},
    {"question": "hello, how", "choices": [" are you?", " is the fox", " lazy"], "answer": 0},
]
CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
WRITING = """\
task: writing
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["zz"]
  max_gen_toks: 12
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over local lines."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choices", CHOICES), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def evaluate(tasks: Path, task: str, kind: str, *flags: str, **model_args: Any) -> list[Any]:
    """Return the answers of a `kind` of model to each question of `task`, as lm-eval logs them."""
    output = tasks / f"{task}-{kind}"
    reported = ",".join(f"{name}={value}" for name, value in model_args.items())
    command = [
        sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", reported, "--tasks", task, "--include_path",
        str(tasks), "--output_path", str(output), "--log_samples", *flags,
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "home"), "OPENAI_API_KEY": "x"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **offline})
    assert ended.returncode == 0, ended.stderr[-4000:]
    (log,) = output.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


@pytest.mark.covers("B.clients.2")
def test_loglikelihoods_are_those_of_the_model_itself(tasks: Path, pair: str, model: Path) -> None:
    served = evaluate(
        tasks, "choices", "local-completions",
        model="tiny", base_url=f"{pair}/v1/completions", tokenizer=model, tokenizer_backend="huggingface",
        num_concurrent=4, max_length=512,
    )  # fmt: skip
    own = evaluate(tasks, "choices", "hf", "--device", "cpu", pretrained=model, dtype="float32", max_length=512)

    assert len(served) == len(QUESTIONS)
    for ours, theirs in zip(served, own, strict=True):
        for (one,), (other,) in zip(ours, theirs, strict=True):
            assert float(one[0]) == pytest.approx(float(other[0]), abs=1e-2)
            assert str(one[1]) == str(other[1])


@pytest.mark.covers("B.clients.3")
def test_generated_text_is_that_of_the_model_itself(tasks: Path, pair: str, model: Path) -> None:
    served = evaluate(
        tasks, "writing", "local-completions",
        model="tiny", base_url=f"{pair}/v1/completions", tokenizer=model, tokenizer_backend="huggingface",
        max_length=512,
    )  # fmt: skip
    own = evaluate(tasks, "writing", "hf", "--device", "cpu", pretrained=model, dtype="float32", max_length=512)

    assert served == own


@pytest.mark.covers("B.clients.3")
def test_the_chat_client_is_answered(tasks: Path, pair: str) -> None:
    outputs = evaluate(
        tasks, "writing", "local-chat-completions", "--apply_chat_template", "--gen_kwargs", "max_gen_toks=100",
        model="tiny", base_url=f"{pair}/v1/chat/completions",
    )  # fmt: skip

    assert len(outputs) == len(QUESTIONS)
    assert all(text for ((text,),) in outputs)
