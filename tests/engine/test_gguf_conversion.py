"""GGUF files of other architectures, tokenizers and widths: their weights, text and tokens, and what is refused."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoints.gguf_conversion import convert, stored_dtype
from engine.checkpoints.gguf_folder import converted_path, ensure_converted, find_gguf
from engine.checkpoints.gguf_rope import rope_parameters
from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.step_runner import generate
from tests.engine.tiny_gguf import SPECIAL, write_tiny_gguf
from wire.errors import ConfigError

_KINDS = gguf.GGMLQuantizationType
_TEXTS = [
    "Hello, world! I've 12345 apples, WE'LL SEE.",
    "  two  spaces\n\n\ttab \r\n end",
    "日本語 🎉 café cafe x=1;y+=22",
    "cafe\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tokens_of_a_converted_model_equal_the_models_own(kind: str, tmp_path: Path) -> None:
    file, network = write_tiny_gguf(tmp_path, kind, pre="smollm" if kind == "llama" else "qwen2")
    prompts = [[5, 9, 200, 31, 7], list(range(40, 75))]
    expected = Oracle(tmp_path / f"{kind}-source", "float32").generate_greedy(prompts, 16, ignore_eos=True)

    convert(file, tmp_path / "out", stored_dtype(file))

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], values) for name, values in network.state_dict().items())
    loaded = load_model(tmp_path / "out", dtype="auto", block_size=16, kv_cache_memory=1 << 20, num_threads=1)
    assert loaded.model.info.dtype == "float32"
    assert generate(loaded.model, prompts, 16, chunk=16) == expected


@pytest.mark.parametrize(
    ("kind", "dtype"), [(_KINDS.F32, "float32"), (_KINDS.F16, "float16"), (_KINDS.Q8_0, "bfloat16")]
)
def test_plain_matrices_keep_their_dtype_quantised_become_bfloat16(
    kind: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path
) -> None:
    file, network = write_tiny_gguf(tmp_path, "llama", stored=kind)

    convert(file, tmp_path / "out", stored_dtype(file))

    stored = load_file(tmp_path / "out" / "model.safetensors")
    values = network.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind).copy())
    assert torch.equal(stored["model.layers.1.mlp.down_proj.weight"], expected.to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


class _Llama3(TikTokenConverter):  # type: ignore[misc]
    """transformers' own converter, given a vocabulary in place of a tiktoken file."""

    def __init__(self, source: dict[str, Any]) -> None:
        super().__init__(extra_special_tokens=list(SPECIAL))
        self._source = source

    def tokenizer(self) -> Tokenizer:
        merges = [tuple(pair) for pair in self._source["merges"]]
        return Tokenizer(BPE(self._source["vocab"], merges, fuse_unk=False, ignore_merges=True))


def _qwen2(source: dict[str, Any]) -> Any:
    made = Qwen2Tokenizer(vocab=source["vocab"], merges=[tuple(pair) for pair in source["merges"]])
    made.add_tokens(list(SPECIAL), special_tokens=True)
    return made.backend_tokenizer


@pytest.mark.parametrize(
    ("pre", "oracle"), [("qwen2", _qwen2), ("llama-bpe", lambda source: _Llama3(source).converted())]
)
def test_text_is_split_as_transformers_does(pre: str, oracle: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    file, _ = write_tiny_gguf(tmp_path, "qwen2", pre=pre)
    convert(file, tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    theirs = oracle(json.loads((tmp_path / "qwen2-source" / "tokenizer.json").read_text())["model"])

    for text in _TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_llama_3_adds_bos_and_others_as_their_file_sets(tmp_path: Path) -> None:
    for pre, begins in (("llama-bpe", True), ("qwen2", None)):
        (tmp_path / pre).mkdir()
        file, _ = write_tiny_gguf(tmp_path / pre, "qwen2", pre=pre)
        convert(file, tmp_path / pre / "out")

        settings = json.loads((tmp_path / pre / "out" / "tokenizer_config.json").read_text())
        assert settings.get("add_bos_token") is begins


def _llama3_rule(theta: float, head_dim: int) -> tuple[dict[str, Any], Any]:
    """Return Llama 3.1's rule, and what it divides frequencies by: transformers' own, default over stretched."""
    rule = {
        "rope_type": "llama3", "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=dict(rule)
    )
    stretched = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    return rule, (theta ** -(torch.arange(0, head_dim, 2) / head_dim) / stretched).numpy()


def test_llama_3s_rotary_rule_is_found_from_its_divisors() -> None:
    rule, divisors = _llama3_rule(500000.0, 64)
    fields = {"general.architecture": "llama", "llama.rope.freq_base": 500000.0}

    assert rope_parameters(fields, divisors) == rule

    divisors[16] *= 1.05
    with pytest.raises(ConfigError, match=r"divides rotary frequency 16 by .*, but Llama 3's rule"):
        rope_parameters(fields, divisors)
    with pytest.raises(ConfigError, match=r"scales its rotary positions \(yarn\)"):
        rope_parameters(fields | {"llama.rope.scaling.type": "yarn"}, None)


def test_divisors_of_rotary_frequencies_reach_the_config(tmp_path: Path) -> None:
    rule, divisors = _llama3_rule(10000.0, 16)
    file, _ = write_tiny_gguf(tmp_path, "llama", divisors=divisors)

    convert(file, tmp_path / "out")

    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == rule
    assert "rope_freqs.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"qwen2", b"mamba", "GGUF architecture mamba is not supported; supported: llama, qwen2, qwen3"),
        (b"qwen2", b"llama", r"tensor blk\.\d\.attn_.\.bias, which llama does not have"),
        (b"blk.0.attn_norm", b"blk.0.attn_mild", r"tensor blk\.0\.attn_mild\.weight"),
        (
            b"smollm",
            b"deepse",
            "tokenizer is gpt2/deepse, which is not supported; supported: llama, gpt2/smollm",
        ),
        (b"rope.freq_base", b"rope.friz_base", None),
        (b"context_length", b"contest_length", "no qwen2.context_length"),
    ],
)
def test_unknown_types_are_refused_by_name(old: bytes, new: bytes, words: str | None, tmp_path: Path) -> None:
    file, _ = write_tiny_gguf(tmp_path, "qwen2")
    file.write_bytes(file.read_bytes().replace(old, new))

    if words is None:  # a base of 10000 is the format's default
        convert(file, tmp_path / "out")
        return
    with pytest.raises(ConfigError, match=words):
        convert(file, tmp_path / "out")


def test_a_folder_with_one_gguf_and_nothing_else_is_found(tmp_path: Path) -> None:
    file, _ = write_tiny_gguf(tmp_path, "llama")

    assert find_gguf(file) == find_gguf(file.parent) == file
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "nowhere") is None
    (file.parent / "config.json").write_text("{}")
    assert find_gguf(file.parent) is None
    (file.parent / "config.json").unlink()
    (file.parent / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files \(b\.gguf, \.\.\.\): name one of them with --model"):
        find_gguf(file.parent)


def test_it_is_converted_once_under_a_name_from_its_content(tmp_path: Path) -> None:
    file, _ = write_tiny_gguf(tmp_path, "llama")
    messages: list[str] = []

    path = ensure_converted(file, tmp_path / "cache", messages.append)

    assert (
        path == converted_path(file, tmp_path / "cache") == ensure_converted(file, tmp_path / "cache", messages.append)
    )
    assert messages == ["converting tiny.gguf to safetensors (once)"]
    assert {one.name for one in path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    assert converted_path(file, tmp_path / "cache") != path


def test_a_second_process_waits_for_a_running_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write_tiny_gguf(tmp_path, "llama")
    path = converted_path(file, tmp_path / "cache")
    path.parent.mkdir(parents=True)
    now, messages = [0.0], list[str]()
    with (path.parent / f".{path.name}-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def sleep(_: float) -> None:
            now[0] += 500.0
            if now[0] == 3500.0:
                path.mkdir()
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(
            "engine.checkpoints.model_cache.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
        )  # fmt: skip

        assert ensure_converted(file, tmp_path / "cache", messages.append) == path

    assert messages == [f"waiting for another process that is creating {path.name}"]


@pytest.mark.long
def test_a_refusal_of_the_converting_process_is_reported(tmp_path: Path) -> None:
    file, _ = write_tiny_gguf(tmp_path, "llama")
    file.write_bytes(file.read_bytes().replace(b"smollm", b"nobody"))

    with pytest.raises(ConfigError, match=r"tiny\.gguf: this GGUF's tokenizer is gpt2/nobody"):
        ensure_converted(file, tmp_path / "cache", lambda words: None)
    assert not [one for one in (tmp_path / "cache" / "gguf").iterdir() if one.is_dir()]


@pytest.mark.long
def test_a_broken_file_is_refused_with_the_converters_last_line(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted: "):
        ensure_converted(file, tmp_path / "cache", lambda words: None)
    assert not [one for one in (tmp_path / "cache" / "gguf").iterdir() if one.is_dir()]
