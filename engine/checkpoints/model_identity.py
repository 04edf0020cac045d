"""Identify a model folder by two short digests, without loading it. Standard library only.

weights: config.json without volatile keys, and the name, dtype, shape and first 64 KiB of every safetensors tensor;
tokenizer: the tokenizer's files. The first does not depend on how a checkpoint is split into files.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.description import ModelIdentity
from wire.errors import ConfigError

_SAMPLE_BYTES = 64 * 1024
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DIGEST_DIGITS = 16
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
_NAMES = ("model.safetensors", "model.safetensors.index.json")
_MODELSLIM = re.compile(r"quant_model_weight[\w.-]*\.safetensors(\.index\.json)?", re.ASCII)
_TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file: its header entry and the offset of its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


def identify(path: Path, name: str) -> ModelIdentity:
    """Return the identity of the model in folder `path`. Raises ConfigError unless it is a safetensors checkpoint."""
    tensors = stored_tensors(path)
    return ModelIdentity(name, _weights_digest(path, tensors), _tokenizer_digest(path))


def name_of(path: Path) -> str:
    """Return the folder's name; in a hub cache (models--OWNER--NAME/snapshots/COMMIT) the model's OWNER/NAME."""
    path = path.resolve()
    is_snapshot = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.parent.parent.name.removeprefix("models--").replace("--", "/") if is_snapshot else path.name


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return every tensor of the checkpoint in folder `path`, sorted by name."""
    files = weight_files(path)
    return sorted((tensor for file in files for tensor in _tensors_of(file)), key=lambda tensor: tensor.name)


def weight_files(path: Path) -> list[Path]:
    """Return the checkpoint's safetensors files. Raises ConfigError naming the missing ones."""
    names = [file.name for file in path.glob("*.safetensors*") if file.is_file()]
    name = modelslim_weights(names) or next((name for name in _NAMES if name in names), "")
    if name.endswith(".safetensors"):
        return [path / name]
    weight_map = read_json(path / name).get("weight_map", {}) if name else {}
    files = [path / Path(name).name for name in sorted(set(weight_map.values()))]
    if not files:
        raise ConfigError(f"{path} has no safetensors weights{_other_weights(path)}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{path / name} names missing files: {', '.join(missing)}")
    return files


def modelslim_weights(names: Iterable[str]) -> str | None:
    """Return the weight file that ModelSlim wrote, or the index of several; None if there is none."""
    found = sorted(name for name in names if _MODELSLIM.fullmatch(name))
    return next((name for name in found if name.endswith(".json")), found[0] if found else None)


def check_folder(path: Path) -> None:
    """Raise ConfigError, with the reason, for a path that is not a model folder."""
    if not (path / "config.json").is_file():
        held = "it has no config.json" if path.is_dir() else "it is a file"
        why = held if path.exists() else "there is no such folder"
        raise ConfigError(f"--model {path} is not a model folder: {why}")


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises ConfigError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, but holds a value of type {type(value).__name__}")
    return value


def _weights_digest(path: Path, tensors: list[StoredTensor]) -> str:
    config = {key: value for key, value in read_json(path / "config.json").items() if key not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    handles = {file: file.open("rb") for file in {tensor.file for tensor in tensors}}
    try:
        for tensor in tensors:
            digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
            handle = handles[tensor.file]
            handle.seek(tensor.offset)
            digest.update(handle.read(min(tensor.length, _SAMPLE_BYTES)))
    finally:
        for handle in handles.values():
            handle.close()
    return digest.hexdigest()[:_DIGEST_DIGITS]


def _tokenizer_digest(path: Path) -> str:
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (path / name).is_file():
            content = (path / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()[:_DIGEST_DIGITS]


def _tensors_of(file: Path) -> Iterator[StoredTensor]:
    """Read one header: 8 bytes little-endian length, JSON {name: {dtype, shape, data_offsets}}, then the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{file}: not a safetensors file (a header of {length} bytes in a file of {size})")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= size - 8 - length:
                    raise ConfigError(
                        f"{file} is cut short: tensor {name} ends at byte {end} of its data, which has "
                        f"{size - 8 - length} bytes"
                    )
                offset = 8 + length + begin
                yield StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, offset, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: its safetensors header is broken: {error}") from error


def _other_weights(path: Path) -> str:
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
    return f", only {', '.join(others[:3])}: convert it to safetensors first" if others else ""
