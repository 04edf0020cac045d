"""--model and --quantization, checked against each other; a GGUF file becomes the folder that it is converted to."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.run_folder import default_cache_dir
from scheduler.model_files import read_model_files
from wire.errors import ConfigError
from wire.model_identity import read_json
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


def check_model(options: EngineOptions) -> None:
    """Raise ConfigError, with path and numbers, for a folder that scheduler or instances would refuse at their start.

    The length is left to the instances where dynamic scaling stretches it, and to a fake engine, which has any.
    """
    read_model_files(options.model, options.max_model_len)
    path = Path(options.model) / "config.json"
    config = read_json(path)
    text = config | config.get("text_config", {})
    own, asked = text.get("max_position_embeddings"), options.max_model_len
    if asked is None or not isinstance(own, int) or options.engine == "fake":
        return
    grows = any("dynamic" in str(text.get(name)) for name in ("rope_scaling", "rope_parameters"))
    if asked > own and not grows:
        raise ConfigError(f"--max-model-len {asked} is above the {own} of {path}: give at most that, or leave it out")


def _check_quantization(options: EngineOptions) -> None:
    """Tell a contradiction where it was typed, not in an instance's log."""
    if options.quantization is not None and (Path(options.model) / "config.json").is_file():
        from engine.quantization.asked import check_asked
        from engine.quantization.config import read_quantization_config

        path = Path(options.model)
        check_asked(path, options.quantization, read_quantization_config(path))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
