"""The tokenizer of a model, as transformers makes it."""

from pathlib import Path
from typing import Any

from engine.torch_start import name_backends, only_meanwhile
from wire.errors import ConfigError


def load_tokenizer(asked: str | None, root: str) -> Any:
    """Return AutoTokenizer's object for the folder or name `asked`, else for `root`, what the server calls its model.

    Raises ConfigError where it is not on this machine, or transformers is not installed.
    """
    with only_meanwhile():
        name_backends()  # transformers may import torch
        return _load(asked, root)


def _load(asked: str | None, root: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError("a tokenizer needs transformers: pip install 'pdserve[engine]'") from error
    if asked is None and not Path(root).is_dir():
        raise ConfigError(f"the model {root!r} is on another machine: name its tokenizer, LLM(..., tokenizer=FOLDER)")
    return AutoTokenizer.from_pretrained(asked or root)
