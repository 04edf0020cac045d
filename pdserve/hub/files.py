"""Select the files of a repository that a server reads. Nothing is downloaded here.

These are config.json, the tokenizer, the chat template, the generation settings, and the safetensors, or .bin if there
are none. Code, and pickle files other than these .bin files, are never selected.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from engine.checkpoints.bin_files import BIN_INDEX, BIN_NAME
from engine.checkpoints.model_identity import modelslim_weights, read_json
from wire.errors import ConfigError

CONFIG = "config.json"
_SAFETENSORS, _SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
_SMALL = re.compile(
    r"[\w-][\w.-]*\.(?:json|jinja)|merges\.txt|vocab\.txt|tokenizer\.model|\d+_\w+/config\.json", re.ASCII
)


def small_files(names: Iterable[str]) -> list[str]:
    """Return the needed files other than weights; config.json is last, so that its presence implies the others."""
    wanted = [name for name in names if _SMALL.fullmatch(name) and not name.endswith(".index.json")]
    return sorted(wanted, key=lambda name: (name == CONFIG, name))


def weight_file(name: str, names: Collection[str]) -> str:
    """Return the weight file, or the index of several. Raises ConfigError if there is neither."""
    for file in (modelslim_weights(names), _SAFETENSORS, _SAFETENSORS_INDEX, BIN_NAME, BIN_INDEX):
        if file is not None and file in names:
            return file
    kinds = (".gguf", ".safetensors", ".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx")
    others = sorted(file for file in names if file.endswith(kinds))
    shown = ", ".join(others[:3])
    has = f"only {shown}{', ...' if len(others) > 3 else ''}" if others else "no weights"
    more = ": download one, and pass its path" if shown.endswith(".gguf") else ""
    raise ConfigError(f"{name} has neither {_SAFETENSORS} nor {BIN_NAME}, nor an index of several; it has {has}{more}")


def shards(index: Path) -> list[str]:
    """Return the files that an index lists. Raises ConfigError for a name that is not a file beside it."""
    weight_map = read_json(index).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    suffix = ".bin" if index.name == BIN_INDEX else ".safetensors"
    wrong = next((v for v in values if not isinstance(v, str) or Path(v).name != v or not v.endswith(suffix)), None)
    if not values or wrong is not None:
        listed = f"{wrong!r}, not" if values else "no"
        raise ConfigError(f"{index}: its weight_map lists {listed} {suffix} files beside it")
    return sorted(set(values))


def is_index(file: str) -> bool:
    """Return whether `weight_file` returned an index."""
    return file.endswith(".index.json")


def is_whole(folder: Path, *, weights: bool) -> bool:
    """Return whether a folder downloaded earlier has config.json and, with `weights`, all weight files."""
    if not (folder / CONFIG).is_file():
        return False
    if not weights:
        return True
    try:
        file = weight_file(folder.name, [entry.name for entry in folder.iterdir()])
        return all((folder / name).is_file() for name in (shards(folder / file) if is_index(file) else [file]))
    except ConfigError:
        return False
