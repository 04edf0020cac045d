"""Find the chat template: in the model's folder, in the operator's file, or on the command line."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wire.errors import ConfigError

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def own_template(folder: Path, tokenizer_config: Mapping[str, Any], name: str = "default") -> str | None:
    """Return the model's template, from its own file or from tokenizer_config.json. Raises ConfigError."""
    return _named_templates(folder, tokenizer_config).get(name)


def given_template(given: str, folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Return the template of `--chat-template`: from that file, the model's template of that name, or the text itself.

    In a text without line breaks, \\n, \\t and \\r are escapes, as typed on a command line. Raises ConfigError if
    `given` is none of the three.
    """
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {given} is not UTF-8: {error}") from error
    except (OSError, ValueError) as error:
        named = _named_templates(folder, tokenizer_config)
        if given in named:
            return named[given]
        if "\n" in given:
            return given
        if "{" in given or "}" in given:
            return re.sub(r"\\[ntr\\]", lambda escape: _ESCAPES[escape[0]], given)
        raise ConfigError(
            f"--chat-template {given} is neither a readable file, nor the name of one of the model's templates, nor a "
            "template's text (which has a brace or a line break)"
        ) from error


def _named_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's templates by name: files take precedence over the config; `default` is the standard one."""
    own = tokenizer_config.get("chat_template")
    entries = own if isinstance(own, list) else [{"name": "default", "template": own}]
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if named.get("default") is None and (folder / "chat_template.json").is_file():
        named["default"] = _in_json(folder / "chat_template.json")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = _read(file)
    if (folder / "chat_template.jinja").is_file():
        named["default"] = _read(folder / "chat_template.jinja")
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _in_json(file: Path) -> Any:
    try:
        content = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    return content.get("chat_template") if isinstance(content, dict) else None
