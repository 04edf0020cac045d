"""Convert the tokenizer in a GGUF file to tokenizer.json and its settings.

`tokenizer.ggml.model` is `llama` for SentencePiece's BPE, `gpt2` for a byte-level one. For the latter,
`tokenizer.ggml.pre` is the split of text before merges: GPT-2's pattern, or a later one that splits numbers.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.checkpoints.gguf_sentencepiece import sentencepiece_bpe
from wire.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType: the first never comes from text, the second is matched literally
_SENTENCEPIECE = "llama"
_DIGITS_AT_ONCE = {"llama-bpe": "{1,3}", "qwen2": ""}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUPPORTED = ("smollm", "gpt-2", *_DIGITS_AT_ONCE)
_SETTINGS = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}


def check_tokenizer(fields: dict[str, Any]) -> None:
    """Raise ConfigError, with the tokenizer's name, if it is not supported."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if model != _SENTENCEPIECE and (model != "gpt2" or pre not in _SUPPORTED):
        known = ", ".join(_SUPPORTED)
        raise ConfigError(
            f"this GGUF's tokenizer is {model}/{pre}, which is not supported; supported: {_SENTENCEPIECE}, gpt2/{known}"
        )


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into folder `target`."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    sentencepiece = fields["tokenizer.ggml.model"] == _SENTENCEPIECE
    tokenizer = sentencepiece_bpe(fields) if sentencepiece else _byte_level_bpe(fields, tokens)
    for kept, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == kept]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = _settings(fields, tokens)
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _byte_level_bpe(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(pre: str) -> Any:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":  # single digits, then GPT-2's pattern over bytes
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = Regex(_WORDS.format(digits=_DIGITS_AT_ONCE[pre]))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _settings(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for name, key in _SETTINGS.items()}
    usual = fields["tokenizer.ggml.model"] == _SENTENCEPIECE or fields["tokenizer.ggml.pre"] == "llama-bpe"
    begins = fields.get("tokenizer.ggml.add_bos_token", usual)
    found = {
        "add_prefix_space": False,
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True if begins and ids["bos_token"] is not None else None,
        **{key: None if i is None else tokens[i] for key, i in ids.items()},
    }
    return {key: value for key, value in sorted(found.items()) if value is not None}
