"""A model's tokenizer, loaded by transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.torch_start import name_backends, only_meanwhile
from pdserve.offline.outputs import RequestOutput
from pdserve.offline.prompts import PromptInput
from pdserve.offline.sampling_params import SamplingParams
from wire.errors import ConfigError


def load_tokenizer(source: str | None, root: str) -> Any:
    """Return AutoTokenizer's object for the folder or name `source`, else for `root`, the server's model folder.

    Raises ConfigError if the folder is not on this machine or transformers is not installed.
    """
    with only_meanwhile():
        name_backends()  # transformers may import torch
        return _load(source, root)


def _load(source: str | None, root: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError("a tokenizer needs transformers: pip install 'pdserve[engine]'") from error
    if source is None and not Path(root).is_dir():
        raise ConfigError(f"the model {root!r} is on another machine: pass its tokenizer, LLM(..., tokenizer=FOLDER)")
    return AutoTokenizer.from_pretrained(source or root)


class SetTokenizer:
    """The script's own tokenizer for the model's token ids, applied here: the server gets only ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encoded(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Any]:
        """Return the prompts, texts encoded to token ids, chats unchanged. Raises ValueError for stop strings."""
        for one in params:
            if one.stops:
                raise ValueError(f"stop is {one.stops!r}: stop strings need the model's own tokenizer")
        return [
            PromptInput(one.text, self.tokenizer.encode(one.text), one.cache_salt, one.images)
            if isinstance(one, PromptInput) and one.token_ids is None
            else one
            for one in prompts
        ]

    def decode(self, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> None:
        """Replace the texts of outputs by this tokenizer's decoding."""
        for output, one in zip(outputs, params, strict=True):
            for choice in output.outputs if one.detokenize else ():
                choice.text = self.tokenizer.decode(choice.token_ids, skip_special_tokens=one.skip_special_tokens)
