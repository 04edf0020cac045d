"""Find a model that is one GGUF file and convert it once, in a separate process, into a checkpoint folder of the cache.

folder with one .gguf --digest--> <cache>/gguf/<file's name>-<digest>/  config.json, *.safetensors, tokenizer.json

The digest covers the file's size and pieces spread over it, so the folder name is the same on every host.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.checkpoints.conversion_child import TIMEOUT_S, convert_in_child, run_conversion
from engine.checkpoints.file_digest import file_digest
from engine.checkpoints.model_cache import make_once
from wire.errors import ConfigError


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at or in `path`, None where there is none or where safetensors exist too.

    Raises ConfigError for a folder with several GGUF files and no safetensors.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ConfigError(f"{path} has {len(files)} GGUF files ({files[0].name}, ...): name one of them with --model")
    return files[0]


def converted_path(file: Path, cache_dir: Path) -> Path:
    """Return the folder of the converted `file`, which may not exist yet."""
    return cache_dir / "gguf" / f"{file.stem}-{file_digest(file)}"


def ensure_converted(file: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return the checkpoint folder of the GGUF `file`, converting it if needed.

    Raises ConfigError with the name of an unsupported architecture or tokenizer.
    """
    target = converted_path(file, cache_dir)

    def make(staging: Path) -> Path:
        progress(f"converting {file.name} to safetensors (once)")
        convert_in_child("engine.checkpoints.gguf_folder", file, staging / target.name)
        return staging / target.name

    return make_once(target, make, progress, timeout_s=TIMEOUT_S)


def main(argv: Sequence[str]) -> int:
    """Convert FILE into the new folder TARGET; a refusal is the last line of stderr."""
    file, target = map(Path, argv)
    return run_conversion(file, lambda: _convert(file, target))


def _convert(file: Path, target: Path) -> None:
    from engine.checkpoints.gguf_conversion import convert, stored_dtype

    try:
        convert(file, target, stored_dtype(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
