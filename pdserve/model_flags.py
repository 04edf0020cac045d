"""--model and --quantization, checked against each other; a GGUF file becomes the folder that it is converted to."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.run_folder import default_cache_dir
from wire.errors import ConfigError
from wire.options import EngineOptions


def with_plain_model(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """Return the options with the converted folder for --model, which stays a name that clients may use.

    Raises ConfigError where --quantization and the files differ, naming both, and for GGUF that is not supported.
    """
    from engine.gguf_folder import ensure_converted, find_gguf

    file = find_gguf(Path(options.model)) if options.model else None
    if file is None:
        if options.quantization == "gguf":
            raise ConfigError(
                f"--quantization gguf, but {options.model or 'the default model'} is no .gguf file, nor a folder with "
                "nothing else"
            )
        _check_quantization(options)
        return options
    if options.quantization not in (None, "gguf"):
        raise ConfigError(f"--quantization {options.quantization}, but {file} is GGUF")
    folder = ensure_converted(file, default_cache_dir(environ), _progress)
    names = (*options.served_model_name, options.model)
    return replace(options, model=str(folder), served_model_name=names, quantization=None)


def _check_quantization(options: EngineOptions) -> None:
    """Tell a contradiction where it was typed, not in an instance's log."""
    if options.quantization is not None and (Path(options.model) / "config.json").is_file():
        from engine.quantization.asked import check_asked
        from engine.quantization.config import read_quantization_config

        path = Path(options.model)
        check_asked(path, options.quantization, read_quantization_config(path))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
