"""Open and check a checkpoint folder's config with transformers. engine/network.py loads the weights."""

import inspect
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from engine.checkpoints.model_identity import check_folder, read_json, stored_tensors
from engine.checkpoints.refusals import refuse_unsupported
from engine.checkpoints.text_network import image_support, rope_sections, text_network_config, text_weights
from engine.checkpoints.weights import Weights
from engine.models.support import ImageSupport
from engine.rope_lengths import longest_sequence
from wire.errors import ConfigError

_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A supported model whose weights are not loaded yet. `config` is transformers' object.

    `stored_dtype`: what its config names, else the dtype of most of its weights; quantised ones do not count.
    With `images` the files also have a vision tower; `config` and `network_class` are those of the text network alone.
    """

    path: Path
    config: Any
    network_class: type[Any]
    stored_dtype: str
    images: ImageSupport | None = None
    rope_sections: tuple[int, ...] = ()

    @property
    def text_config(self) -> Any:
        """The language model's part of the config."""
        return self.config.get_text_config(decoder=True)

    @property
    def keeps_logits(self) -> bool:
        """Whether its forward pass can compute the logits of selected rows only."""
        return "logits_to_keep" in inspect.signature(self.network_class.forward).parameters

    def weights(self, stored: Weights) -> Weights:
        """Return the stored tensors by the names of its network."""
        return stored if self.images is None else text_weights(stored)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check everything but the weights. Raises ConfigError for a model that cannot be served."""
    check_folder(path)
    whole = _read_config(path)
    images = image_support(whole)
    config = whole if images is None else text_network_config(whole, images)
    network_class = _network_class(path, config)
    refuse_unsupported(path, config, network_class)
    sections = () if images is None else rope_sections(whole, images)
    return Checkpoint(path, config, network_class, _stored_dtype(path, whole), images, sections)


def model_length(checkpoint: Checkpoint, requested: int | None) -> int:
    """Return the maximum length of a sequence: `requested`, else the model's. Raises ConfigError with both numbers."""
    own = longest_sequence(checkpoint.text_config)
    if own is None and requested is None:
        raise ConfigError(f"{checkpoint.path} has no maximum length in its config: set --max-model-len")
    if requested is not None and (requested < 1 or (own is not None and requested > own)):
        limits = "at least 1" if own is None else f"from 1 to the model's {own}"
        raise ConfigError(f"--max-model-len is {requested}, but must be {limits}")
    return requested if requested is not None else own or 0


def eos_token_ids(network: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence: generation_config.json's, else the config's."""
    ids = network.generation_config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _read_config(path: Path) -> Any:
    kind = read_json(path / "config.json").get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{path}: model type {kind} is not supported by transformers {transformers.__version__}; "
            "code in a checkpoint is never run"
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/config.json is not a config that transformers supports: {error}") from error


def _stored_dtype(path: Path, config: Any) -> str:
    """Return `Checkpoint.stored_dtype`. Raises ConfigError for a checkpoint without floats."""
    tensors = stored_tensors(path)
    num_bytes: dict[str, int] = defaultdict(int)
    for one in tensors:
        if one.dtype in _STORED_DTYPES:  # scales count as 0 bytes: they decide only where there are no weights
            num_bytes[_STORED_DTYPES[one.dtype]] += one.length if one.name.endswith(".weight") else 0
    if not num_bytes:
        first = f": its first tensor has dtype {tensors[0].dtype}" if tensors else ""
        raise ConfigError(f"{path} has no floating-point tensors{first}")
    named = (str(one.dtype).removeprefix("torch.") for one in (config, config.get_text_config(decoder=True)))
    most = max(num_bytes, key=num_bytes.__getitem__)
    return next((name for name in named if name in _STORED_DTYPES.values()), most)


def _network_class(path: Path, config: Any) -> type[Any]:
    try:
        found = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise ConfigError(f"{path}: model type {config.model_type} is not a causal language model") from error
    classes: tuple[type[Any], ...] = found if isinstance(found, tuple) else (found,)
    names = config.architectures or []
    return next((cls for cls in classes if cls.__name__ in names), classes[0])
