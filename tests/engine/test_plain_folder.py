"""Folders that lack safetensors or tokenizer.json: what is made of them, once, and that it is the same model."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from engine.checkpoints.bin_files import BIN_NAME
from engine.checkpoints.model_identity import identify
from engine.checkpoints.plain_folder import _make, ensure_plain, lacking
from engine.loader import load_model
from scheduler.model.files import read_model_files
from scheduler.tokens import Tokens
from tests.engine.bin_models import make_bin_model, split_tokenizer
from tests.engine.step_runner import generate
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.hub.printed_models import put_code
from wire.errors import ConfigError

PROMPTS = [[2, 304, 81, 14, 298], [2, 33, 44, 55, 66, 77, 88]]
TEXTS = ("hello, how are you?", "  two  spaces\n\n\ttab 12345 I've", "日本語 🎉 café", "a<|im_end|>b <|endoftext|>", "")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bin_model(tmp_path_factory.mktemp("opt"))


def answers_of_transformers(folder: Path) -> list[list[int]]:
    """Return what plain transformers generates greedily, reading the .bin by itself."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        answers.append(made[0].tolist()[len(prompt) :])
    return answers


def silent(words: str) -> None:
    pass


def test_a_complete_folder_is_used_unchanged(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")

    assert ensure_plain(folder, tmp_path / "cache", silent, name="llama") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.often("opt-2-model.", "llama-3-None")
@pytest.mark.covers("A11.8")
@pytest.mark.parametrize(
    ("kind", "shards", "prefix"), [("opt", 1, None), ("opt", 2, "model."), ("llama", 3, None), ("qwen2", 1, None)]
)
def test_the_converted_model_answers_as_transformers_from_bin(
    kind: str, shards: int, prefix: str | None, tmp_path: Path
) -> None:
    folder = make_bin_model(tmp_path / "source", kind, shards=shards, prefix=prefix)
    expected = answers_of_transformers(folder)

    _make(folder, tmp_path / "made", lacking(folder, weights=True))

    model = load_model(tmp_path / "made", dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model
    assert generate(model, PROMPTS, 12, chunk=4) == expected


def test_the_tokenizer_made_of_two_files_is_that_of_transformers(opt: Path, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(opt)

    made = ensure_plain(opt, tmp_path, silent, name="opt", weights=False)

    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids[1:], skip_special_tokens=False) == text


def test_a_scheduler_gets_the_tokenizer_without_the_weights(opt: Path, tmp_path: Path) -> None:
    made = ensure_plain(opt, tmp_path, silent, name="opt", weights=False)

    assert {file.name for file in made.iterdir()} == {
        "config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    }  # fmt: skip


def test_existing_safetensors_are_linked_to(tmp_path: Path) -> None:
    folder = make_tiny_model("opt", tmp_path / "opt")
    split_tokenizer(folder)

    made = ensure_plain(folder, tmp_path / "cache", silent, name="opt")

    assert (made / "model.safetensors").resolve() == folder / "model.safetensors"
    assert identify(made, "opt").weights_digest == identify(folder, "opt").weights_digest


def test_a_plain_folder_is_made_once_without_model_code(opt: Path, tmp_path: Path) -> None:
    folder, marker, messages = tmp_path / "with-code", tmp_path / "marker", list[str]()
    shutil.copytree(opt, folder)
    put_code(folder, marker)

    made = ensure_plain(folder, tmp_path / "a", messages.append, name="opt-125m")
    again = ensure_plain(folder, tmp_path / "a", messages.append, name="opt-125m")
    load_model(made, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1)

    assert (made, made.parent) == (again, tmp_path / "a" / "checkpoints")
    assert len(messages) == 1
    assert messages[0].startswith(f"converting {folder} to safetensors: 1 .bin, ")
    assert {file.suffix for file in made.iterdir()} == {".json", ".txt", ".safetensors"}
    assert not marker.exists()


def test_code_in_a_used_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = make_tiny_model("llama", tmp_path / "llama"), tmp_path / "marker"
    put_code(folder, marker)

    made = ensure_plain(folder, tmp_path / "cache", silent, name="llama")
    load_model(made, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1)
    Tokens(read_model_files(str(made)))

    assert made == folder
    assert not marker.exists()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(Exception, match="Evil"):
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists(), "with trust it would have run"


def test_it_is_the_same_model_on_every_host(opt: Path, tmp_path: Path) -> None:
    for host in ("one", "other"):
        _make(opt, tmp_path / host, lacking(opt, weights=True))

    assert identify(tmp_path / "one", "m") == identify(tmp_path / "other", "m")


def test_another_tokenizer_or_config_is_another_folder(opt: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(opt, tmp_path / "copy"))
    before = ensure_plain(copy, tmp_path, silent, name="opt", weights=False)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))

    after = ensure_plain(copy, tmp_path, silent, name="opt", weights=False)

    assert after != before
    assert Tokenizer.from_file(str(after / "tokenizer.json")).encode("a").ids[0] != 2


def test_several_processes_at_once_make_it_once(opt: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    made: list[Path] = []

    def make() -> None:
        made.append(ensure_plain(opt, tmp_path, messages.append, name="opt", weights=False))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)

    assert len(set(made)) == 1
    assert len(made) == 3
    assert sum(words.startswith("making") for words in messages) == 1


HALF_WAY = """
import sys, time
from pathlib import Path
from engine.checkpoints import plain_folder

def stop(module, folder, target, parts):
    target.mkdir()
    (target / "config.json").write_text("{}")
    print("half", flush=True)
    time.sleep(600)

plain_folder.convert_in_child = stop
plain_folder.ensure_plain(Path(sys.argv[1]), Path(sys.argv[2]), lambda words: None, name="opt", weights=False)
"""


def test_a_killed_conversion_leaves_nothing_in_the_way(opt: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HALF_WAY, str(opt), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "half\n"
        maker.kill()
    assert [file.is_dir() for file in (tmp_path / "checkpoints").iterdir() if not file.name.endswith("lock")] == [True]

    made = ensure_plain(opt, tmp_path, silent, name="opt", weights=False)

    assert (made / "tokenizer.json").is_file()
    assert [file for file in made.parent.iterdir() if not file.name.endswith("lock")] == [made]


def test_a_refusal_of_the_child_process_is_quoted(opt: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "opt"}')
    (folder / BIN_NAME).write_bytes(b"no archive")

    with pytest.raises(ConfigError, match=rf"^{folder}/{BIN_NAME} was not written by torch.save"):
        ensure_plain(folder, tmp_path / "cache", silent, name="bad")
    assert [file.suffix for file in (tmp_path / "cache" / "checkpoints").iterdir()] != []
    assert not any(file.is_dir() for file in (tmp_path / "cache" / "checkpoints").iterdir())


def test_broken_merges_are_named_with_their_line(opt: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    for name in ("config.json", "vocab.json", "tokenizer_config.json"):
        (folder / name).write_bytes((opt / name).read_bytes())
    (folder / "merges.txt").write_text("#version: 0.2\na b\nabc\n")

    with pytest.raises(ConfigError, match=r"merges\.txt, line 3: 'abc' is not a pair of pieces"):
        ensure_plain(folder, tmp_path, silent, name="bad", weights=False)


def test_a_conversion_ends_with_its_waiting_process(opt: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").write_text("import time\nprint(flush=True)\ntime.sleep(600)\n")
    code = (
        "import sys; from engine.checkpoints.conversion_child import convert_in_child; from pathlib import Path\n"
        "import subprocess; run = subprocess.run\n"
        "subprocess.run = lambda *a, capture_output, **k: run(*a, **k)  # its stdout is ours\n"
        "convert_in_child('engine.checkpoints.plain_folder', Path(sys.argv[1]), Path(sys.argv[2]), ['tokenizer'])"
    )
    command = [sys.executable, "-P", "-c", code, str(opt), str(tmp_path / "made")]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "\n"
        waiting.kill()

        assert waiting.stdout.read() == "", "no process has the pipe open any more"


def test_a_cache_that_cannot_be_written_is_named(opt: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(
        ConfigError, match=rf"{opt} cannot be converted into {tmp_path}/file/checkpoints/opt-\w+: .*Not a"
    ):
        ensure_plain(opt, tmp_path / "file", silent, name="opt", weights=False)
