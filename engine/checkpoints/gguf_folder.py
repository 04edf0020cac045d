"""A model that is one GGUF file: found, and turned once into a checkpoint folder of the cache, by a process of its own.

folder with one .gguf --digest--> <cache>/gguf/<file's name>-<digest>/  config.json, *.safetensors, tokenizer.json

The digest is of the file's size and of pieces spread over it, so the same file has the same folder name on every host.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.checkpoints.conversion_child import TIMEOUT_S, answer_caller, convert_apart
from engine.checkpoints.file_digest import file_digest
from engine.checkpoints.model_cache import make_once
from wire.errors import ConfigError


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is or holds, None where it is anything else or has safetensors too.

    Raises ConfigError for a folder with several and nothing else.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ConfigError(f"{path} holds {len(files)} GGUF files ({files[0].name}, ...): name one of them by --model")
    return files[0]


def converted_path(file: Path, cache_dir: Path) -> Path:
    """Return the folder where the model of `file` lies once it is made."""
    return cache_dir / "gguf" / f"{file.stem}-{file_digest(file)}"


def ensure_converted(file: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return the checkpoint folder of the GGUF `file`, making it if need be.

    Raises ConfigError for an architecture or a tokenizer that is not supported, by name.
    """
    target = converted_path(file, cache_dir)

    def make(staging: Path) -> Path:
        progress(f"converting {file.name} to safetensors (once)")
        convert_apart("engine.checkpoints.gguf_folder", file, staging / target.name)
        return staging / target.name

    return make_once(target, make, progress, timeout_s=TIMEOUT_S)


def main(argv: Sequence[str]) -> int:
    """Convert FILE into the new folder TARGET; a refusal is the last line of stderr."""
    file, target = map(Path, argv)
    return answer_caller(file, lambda: _convert(file, target))


def _convert(file: Path, target: Path) -> None:
    from engine.checkpoints.gguf_conversion import convert, stored_dtype

    try:
        convert(file, target, stored_dtype(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
