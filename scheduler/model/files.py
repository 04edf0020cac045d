"""What the scheduler reads of a model's folder: the context length, token ids and the chat template; never weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from images.checkpoint import VisionCheckpoint, read_vision
from scheduler.model.kind import ModelKind, kind_of, labels_of
from scheduler.model.overrides import dimensions_of, with_overrides
from scheduler.templates.chat_options import SPECIAL_TOKEN_NAMES
from scheduler.templates.files import given_template, own_template
from scheduler.tools.parsers.registry import format_of_template
from wire.errors import ConfigError
from wire.shared_limits import unused_positions

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Properties of one model folder. `vocab_size` is the width of the model's output, not the tokenizer's size.

    `tool_template`, if the model has one of its own, is the chat template of conversations with tools. `call_format` is
    the format of tool calls that the template shows, None if it shows none that is known. `labels` are the classes of
    a model that classifies. `prompts` are the prefixes that the model expects, by kind of text (sentence-transformers).
    `vision` says how images stand in its prompts, None for a model that takes text only. `dimensions` are the
    sizes to which its vectors may be cut: empty means any size, None that they may not be cut.
    """

    folder: Path
    vocab_size: int | None
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    eos_token: str | None
    add_bos_token: bool | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_given: bool = False
    tool_template: str | None = None
    kind: ModelKind = ModelKind.TEXT
    add_eos_token: bool | None = None
    call_format: str | None = None
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    vision: VisionCheckpoint | None = None
    dimensions: tuple[int, ...] | None = None


def read_model_files(
    folder: str, max_model_len: int | None = None, chat_template: str | None = None, overrides: str | None = None
) -> ModelFiles:
    """Read the folder; `max_model_len` limits the context length; `chat_template` (file or text) replaces the model's.

    `overrides` replace values of config.json. Raises ConfigError naming the file and what is wrong with it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"--model {folder} is not a folder")
    config = with_overrides(_read_json(path / "config.json"), overrides)
    text_config = {**config, **config.get("text_config", {})}
    tokenizer_config = _read_json(path / "tokenizer_config.json", required=False)
    generation_config = _read_json(path / "generation_config.json", required=False)
    special = _special_tokens(tokenizer_config, _read_json(path / "special_tokens_map.json", required=False))
    if chat_template:
        templates = [given_template(chat_template, path, tokenizer_config), None]
    else:
        templates = [own_template(path, tokenizer_config, name) for name in ("default", "tool_use")]
    return ModelFiles(
        folder=path,
        vocab_size=text_config.get("vocab_size"),
        max_model_len=_max_model_len(text_config, max_model_len, path),
        eos_token_ids=_read_token_ids(generation_config.get("eos_token_id"), text_config.get("eos_token_id")),
        eos_token=special.get("eos_token"),
        add_bos_token=tokenizer_config.get("add_bos_token"),
        special_tokens=special,
        chat_template=templates[0],
        chat_template_given=bool(chat_template),
        tool_template=templates[1],
        kind=kind_of(config),
        add_eos_token=tokenizer_config.get("add_eos_token"),
        call_format=format_of_template(templates[1] or templates[0]),
        labels=labels_of(config),
        prompts=_prompts(_read_json(path / "config_sentence_transformers.json", required=False)),
        vision=read_vision(path),
        dimensions=dimensions_of(config),
    )


def _prompts(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("prompts")
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path} is missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a value of type {type(content).__name__}, not an object")
    return content


def _max_model_len(config: Mapping[str, Any], limit: int | None, folder: Path) -> int:
    lengths: list[int] = [config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)]
    unused = unused_positions(str(config.get("model_type")), config.get("pad_token_id"))
    bounds = [length - unused for length in lengths[:1]] + ([limit] if limit is not None else [])
    if kind_of(config) is not ModelKind.TEXT:
        longest = _read_json(folder / "sentence_bert_config.json", required=False).get("max_seq_length")
        bounds += [longest] if isinstance(longest, int) and longest > 0 else []
    if not bounds:
        raise ConfigError(f"{folder / 'config.json'} has no maximum sequence length: set --max-model-len")
    return min(bounds)


def _read_token_ids(*values: Any) -> tuple[int, ...]:
    """Return the ids in the values (each an int, a list of ints or None), in order and without duplicates."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(item for item in flat if isinstance(item, int)))


def _special_tokens(*files: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; the first file that has one wins."""
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        texts = (_token_text(file.get(name)) for file in files)
        if (text := next((text for text in texts if text is not None), None)) is not None:
            found[name] = text
    return found


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
