"""Find weights written by torch.save (pytorch_model.bin, whole or in shards) and check them as archives.

Such a file is a zip of one pickle, which describes the tensors, and of their bytes. Nothing here reads the pickle.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.model_identity import read_json
from wire.errors import ConfigError

BIN_NAME = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_MAX_PICKLE_BYTES = 256 << 20
_OTHER_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


@dataclass(frozen=True, slots=True)
class BinFiles:
    """The files of a checkpoint and, where there is an index, the names of the tensors in each."""

    files: tuple[Path, ...]
    names_by_file: dict[str, frozenset[str]]


def find_bin_files(folder: Path) -> BinFiles | None:
    """Return the .bin checkpoint of a folder that has no safetensors, None for any other folder.

    Raises ConfigError for an index that lists missing files, and for a folder with only pickles of other names.
    """
    if not (folder / "config.json").is_file() or any((folder / name).is_file() for name in _SAFETENSORS):
        return None
    if (folder / BIN_NAME).is_file():
        return BinFiles((folder / BIN_NAME,), {})
    if (folder / BIN_INDEX).is_file():
        return _indexed(folder)
    others = sorted(file.name for pattern in _OTHER_PICKLES for file in folder.glob(pattern))
    if others and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} has no safetensors, only {', '.join(others[:3])}: of pickles, only {BIN_NAME} or the files in "
            f"{BIN_INDEX} are converted"
        )
    return None


def check_archive(file: Path) -> None:
    """Raise ConfigError unless the file is an archive in the format of torch.save since torch 1.6."""
    size = file.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{file} was not written by torch.save of torch 1.6 or later ({error}): other pickles are refused; "
            "save it again as safetensors"
        ) from error
    packed = next((one.filename for one in members if one.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ConfigError(f"{file}: {packed} in it is compressed, which torch.save does not do: refused")
    if sum(one.file_size for one in members) > size:
        raise ConfigError(f"{file}: its entries claim more than its {size} bytes: refused")
    pickles = [one for one in members if one.filename.endswith(".pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
        sizes = ", ".join(f"{one.filename} of {one.file_size} bytes" for one in pickles) or "none"
        raise ConfigError(
            f"{file}: must have one pickle of at most {_MAX_PICKLE_BYTES} bytes, but has {sizes}: refused"
        )


def _indexed(folder: Path) -> BinFiles:
    index = folder / BIN_INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"{index}: its weight_map must map tensor names to files")
    names = sorted(set(weight_map.values()))
    strange = next((name for name in names if Path(name).name != name or not name.endswith(".bin")), None)
    if strange is not None:
        raise ConfigError(f"{index} names {strange!r}, which is not a .bin file of the folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{index} lists missing files: {', '.join(missing)}")
    by_file = {name: frozenset(key for key, file in weight_map.items() if file == name) for name in names}
    return BinFiles(tuple(folder / name for name in names), by_file)
