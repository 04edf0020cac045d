"""A random Qwen2 that thinks, answers and calls tools as scripted: a real network, over real KV, with known answers.

The chat template ends with `<|tools|>` where a request has tools and its last message is not the result of a call, and
with `<|text|>` otherwise. One attention head reads that token back at every step, and the logits are high for what
follows the last token in its script. All other weights are noise, so each log probability depends on the whole KV.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.engine.tiny_models import EOS, save_tiny_tokenizer

THINKING = (
    "Let", " me", " think", " about", " what", " is", " wanted", " here", ".", " First", " one", " thing", ",", " then",
    " another", ",\n", " and", " so", " on", " until", " all", " of", " it", " fits", " together", "!",
)  # fmt: skip
ANSWER = (
    "Good", " morning", ":", " today", " there", " will", " be", " sun", " ", b"\xe2", b"\x98", b"\x80", " in",
    " most", " places", ";", " take", " a", " hat", " with", " you", " if", " walking", " far", " from", " home", ". ",
)  # fmt: skip
PLAN = ("I", " need", " weather", " data", ".", " Two", " calls", " should", " do", ";", " begin", " at", " once")
BEFORE_CALLS = ("Look", "ing", " up", "...")
WEATHER = (
    '\n{"name": "wea', 'ther", "argu', 'ments": {"city', '": "Z', b"\xc3", b"\xbc", "rich", " ", b"\xe2", b"\x98",
    b"\x80", " or <tool", '_call>", "days', '": [', "1", ", ", "2", "]}", "}\n",
)  # fmt: skip
NOW = ("\n\n", "<tool", "_call>", '{"name"', ': "now", ', '"arguments": {', "}}", "</tool_", "call>")
"""A call whose markers are not tokens of their own."""
_SCRIPTS: dict[str, tuple[str | bytes, ...]] = {
    "<|text|>": ("<think>", *THINKING, "</think>", *ANSWER, EOS),
    "<|tools|>": (
        "<think>", *PLAN, "</think>", *BEFORE_CALLS, "<tool_call>", *WEATHER, "</tool_call>", *NOW, EOS,
    ),
}  # fmt: skip
NUM_TOKENS = {"text": len(_SCRIPTS["<|text|>"]), "tools": len(_SCRIPTS["<|tools|>"])}
"""Tokens of a whole answer, its markers and the last one included."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools and messages[-1]['role'] != 'tool' %}<|tools|>{% else %}<|text|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
_MARKERS = ("<|text|>", "<|tools|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_HIDDEN, _HEAD = 256, 64
_SHARPER = 2.5
_FLAG, _ALWAYS = _HIDDEN - 1, _HIDDEN - 2  # hidden dimensions: of the tokens which choose a script, and of all tokens


def text_of(pieces: tuple[str | bytes, ...]) -> str:
    """Return the text of these tokens."""
    return b"".join(one if isinstance(one, bytes) else one.encode() for one in pieces).decode()


def make_scripted_model(
    folder: Path, tokenizer_of: Path | None = None, max_length: int = 512, *, likely: Mapping[str, float] | None = None
) -> Path:
    """Write the model with its chat template, and its tokenizer: a tiny one, or one like that of another model.

    `likely` are weights of tokens that are likelier everywhere, less than a script's next one. Returns the folder.
    """
    folder.mkdir(parents=True)
    if tokenizer_of is None:
        save_tiny_tokenizer(folder)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_of / name, folder / name)
    tokenizer = _save_tokenizer(folder)
    size = tokenizer.get_vocab_size()
    shown = _byte_letters()
    ids = tokenizer.get_vocab()
    scripts = {ids[selector]: [ids[_name(piece, shown)] for piece in script] for selector, script in _SCRIPTS.items()}
    blanks = [token for token in range(size) if not tokenizer.decode([token], skip_special_tokens=False).strip()]
    config = Qwen2Config(
        vocab_size=size, hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=max_length, rope_theta=1e6, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=ids[EOS], pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _write_scripts(network, scripts, blanks)
        if tokenizer_of is not None:  # the noise of so many tokens adds up
            network.lm_head.weight *= _SHARPER
        for token, weight in (likely or {}).items():
            network.lm_head.weight[ids[_name(token, shown)], _ALWAYS] += weight
    network.save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path) -> Tokenizer:
    """Give the tokenizer a token for each piece, which it never finds in a text."""
    path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    vocab, shown = content["model"]["vocab"], _byte_letters()
    for script in _SCRIPTS.values():
        for piece in script:
            if piece not in (*_MARKERS, EOS):
                vocab.setdefault(_name(piece, shown), len(vocab))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in _MARKERS])
    tokenizer.save(str(path))
    settings = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps(settings | {"chat_template": _TEMPLATE}), encoding="utf-8")
    return tokenizer


def _name(piece: str | bytes, shown: dict[int, str]) -> str:
    """Return the vocabulary's name of a piece."""
    if isinstance(piece, str) and piece in (*_MARKERS, EOS):
        return piece
    return "".join(shown[byte] for byte in (piece if isinstance(piece, bytes) else piece.encode()))


def _byte_letters() -> dict[int, str]:
    """Return the letter for each byte in a byte-level vocabulary, which GPT-2's authors chose."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _write_scripts(network: Any, scripts: dict[int, list[int]], blanks: list[int]) -> None:
    """Set the weights that follow the scripts; the others stay noise. Blanks are unlikely: grammars allow many."""
    embedding, head = network.model.embed_tokens.weight, network.lm_head.weight  # [vocab, hidden]
    embedding.copy_(torch.nn.functional.normalize(torch.randn_like(embedding), dim=1))
    embedding[:, _FLAG], embedding[:, _ALWAYS] = 0, 0.5
    embedding[list(scripts), _FLAG] = 3
    for layer in network.model.layers:
        layer.self_attn.o_proj.weight *= 0.3
    attention = network.model.layers[0].self_attn
    slow = _HEAD // 2 - 1  # the dimension of a head that positions turn least
    attention.q_proj.bias[slow] = 40
    attention.k_proj.weight[slow] = 0
    attention.k_proj.weight[slow, _FLAG] = 1
    values = torch.randn(_HEAD, _HIDDEN) / math.sqrt(_HIDDEN)
    values[:, _ALWAYS:] = 0
    attention.v_proj.weight[:_HEAD] = values
    attention.o_proj.weight[:, :_HEAD] = 0.3 * values.T
    head.normal_(std=0.05)
    head[:, _ALWAYS] = 0
    head[blanks, _ALWAYS] = -1
    for selector, script in scripts.items():
        direction = torch.nn.functional.normalize(values.T @ (values @ embedding[selector]), dim=0)  # of what is read
        follows = dict(zip([selector, *script], script, strict=False))
        assert len(follows) == len(script), "a token is in its script twice"
        for token, following in follows.items():
            head[following, :_ALWAYS] += (2 if following in blanks else 1) * embedding[token, :_ALWAYS]
        head[list(set(script) - set(blanks))] += 0.5 * direction
