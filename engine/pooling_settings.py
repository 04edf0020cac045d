"""How a model's hidden states become one vector, read from the sentence-transformers files in its folder.

modules.json lists the stages; 1_Pooling/config.json has the pooling mode; a Normalize stage scales vectors to length 1;
sentence_bert_config.json limits the length of a text. Without these files decoders use the last token and encoders the
first, normalised, as other servers of such models do.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.model_identity import read_json
from wire.errors import ConfigError

_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """The model's defaults: `how` is last, mean or cls; `max_length` in tokens, None for the network's limit."""

    how: str
    normalize: bool
    max_length: int | None = None


def read_settings(path: Path, *, is_decoder: bool) -> PoolingSettings:
    """Read the model folder `path`. Raises ConfigError for a pooling mode that is not supported."""
    max_length = _max_length(path)
    if not (path / "modules.json").is_file():
        return PoolingSettings("last" if is_decoder else "cls", normalize=True, max_length=max_length)
    stages = _module_stages(path / "modules.json")
    pooling = next((folder for kind, folder in stages if kind == "Pooling"), None)
    how = "last" if is_decoder else "cls"
    if pooling is not None:
        how = _pooling_mode(path / pooling / "config.json")
    for kind, folder in stages:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(f"{path / 'modules.json'}: the stage {kind} ({folder}) is not supported")
    return PoolingSettings(how, any(kind == "Normalize" for kind, _ in stages), max_length)


def _module_stages(file: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each stage."""

    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [(str(entry["type"]).rpartition(".")[2], Path(str(entry["path"])).name) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read as a list of stages: {error}") from error


def _pooling_mode(file: Path) -> str:
    config = read_json(file)
    named = sorted(name for name, value in config.items() if name.startswith("pooling_mode_") and value is True)
    if "pooling_mode" in config and not named:
        named = [f"pooling_mode_{config['pooling_mode']}"]
    modes = [_MODES.get(name, _MODES.get(f"{name}_tokens", _MODES.get(f"{name}_token"))) for name in named]
    if len(modes) != 1 or modes[0] is None:
        raise ConfigError(
            f"{file}: pooling by {', '.join(named) or 'nothing'} is not supported: only mean, cls or last"
        )
    return modes[0]


def _max_length(path: Path) -> int | None:
    file = path / "sentence_bert_config.json"
    value = read_json(file).get("max_seq_length") if file.is_file() else None
    return value if isinstance(value, int) and value > 0 else None
