"""What a script may know of the model: the part of vLLM's ModelConfig that is there without an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`model` is the folder as its server names it, `max_model_len` in tokens."""

    model: str
    served_model_name: str
    tokenizer: str
    max_model_len: int
    seed: int | None

    @property
    def hf_config(self) -> Any:
        """The model's config.json, as transformers reads it. Raises ConfigError where the folder is not here."""
        if not Path(self.model).is_dir():
            raise ConfigError(f"the model {self.model!r} is on another machine: its config is not here")
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    def get_vocab_size(self) -> int:
        """Return how many token ids the model has."""
        return int(self.hf_config.get_text_config().vocab_size)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises NotImplementedError: vLLM's class has about a hundred fields of its engine's."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"model_config has no {name}: hf_config has what the model's config.json says")
