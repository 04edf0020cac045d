"""The part of vLLM's ModelConfig that is available without an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`model` is the folder as reported by the server, `max_model_len` is in tokens."""

    model: str
    served_model_name: str
    tokenizer: str
    max_model_len: int
    seed: int | None

    @property
    def hf_config(self) -> Any:
        """The model's config.json, read by transformers. Raises ConfigError if the folder is not on this machine."""
        if not Path(self.model).is_dir():
            raise ConfigError(f"the model {self.model!r} is on another machine: its config is not available here")
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    def get_vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return int(self.hf_config.get_text_config().vocab_size)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises NotImplementedError: vLLM's class has about a hundred engine fields."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"model_config has no {name}: hf_config has the model's config.json")
