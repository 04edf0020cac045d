"""Check --model and --quantization; turn hub names, GGUF files and .bin weights into a plain model folder."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.checkpoints.model_identity import read_json
from flags.options import EngineOptions
from pdserve.hub.download_job import HUGGING_FACE, MODEL_SCOPE, DownloadJob, is_hub_name
from pdserve.hub.snapshot import find_snapshot
from pdserve.run_folder import default_cache_dir
from scheduler.model.files import read_model_files
from wire.errors import ConfigError


def with_plain_model(options: EngineOptions, environ: Mapping[str, str], *, weights: bool = True) -> EngineOptions:
    """Return the options with a folder of safetensors and tokenizer.json as --model; the old value stays a served name.

    Files are downloaded or converted once. A scheduler needs no `weights`. Raises ConfigError
    if --quantization and the files differ, naming both, and for a model that cannot be provided, with the reason.
    """
    from engine.checkpoints.gguf_folder import ensure_converted, find_gguf
    from engine.checkpoints.plain_folder import ensure_plain

    if not options.model:
        _check_not_gguf(options)
        return options
    typed, needs_weights = options.model, weights and options.engine != "fake"
    plain = _with_snapshot(options, environ, weights=needs_weights)
    file, cache = find_gguf(Path(plain.model)), default_cache_dir(environ)
    if file is None:
        _check_not_gguf(plain)
        name = typed.rstrip("/").rpartition("/")[2]
        folder = ensure_plain(Path(plain.model), cache, print_progress, name=name, weights=needs_weights)
    elif options.quantization not in (None, "gguf"):
        raise ConfigError(f"--quantization {options.quantization}, but {file} is GGUF")
    else:
        folder = ensure_converted(file, cache, print_progress)
        plain = replace(plain, quantization=None)
    if folder == Path(typed):
        return plain
    return replace(plain, model=str(folder), served_model_name=(*options.served_model_name, typed))


def hub_of(options: EngineOptions, environ: Mapping[str, str]) -> str:
    """Return the hub: from --hub, else from vLLM's variable."""
    wants_model_scope = environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("true", "1")
    return options.hub or (MODEL_SCOPE if wants_model_scope else HUGGING_FACE)


def check_model(options: EngineOptions) -> None:
    """Raise ConfigError, with path and numbers, for a folder that scheduler or instances would refuse at start.

    The length is not checked with dynamic RoPE scaling, which extends it, nor for a fake engine, which has no limit.
    """
    read_model_files(options.model, options.max_model_len)
    path = Path(options.model) / "config.json"
    config = read_json(path)
    text = config | config.get("text_config", {})
    own, wanted = text.get("max_position_embeddings"), options.max_model_len
    if wanted is None or not isinstance(own, int) or options.engine == "fake":
        return
    grows = any("dynamic" in str(text.get(name)) for name in ("rope_scaling", "rope_parameters"))
    if wanted > own and not grows:
        raise ConfigError(f"--max-model-len {wanted} exceeds {own}, the limit in {path}: use at most that, or omit it")


def download_flags(options: EngineOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags with which another machine downloads a hub model at the same commit; none for a folder."""
    if not _is_at_hub(options):
        return {}
    job = _download_job(options, environ, weights=True)
    flags = {
        "model": job.name, "hub": job.hub, "revision": find_snapshot(job, environ).commit or job.revision,
        "download_dir": job.download_dir,
    }  # fmt: skip
    return {name: value for name, value in flags.items() if value is not None}


def _with_snapshot(options: EngineOptions, environ: Mapping[str, str], *, weights: bool) -> EngineOptions:
    """Return the options with the downloaded folder of a hub model, and without the hub flags."""
    if not _is_at_hub(options):
        if options.revision is not None:
            raise ConfigError(f"--revision {options.revision} is for a hub model, but {options.model} is not one")
        return replace(options, download_dir=None, hub=None)
    folder = find_snapshot(_download_job(options, environ, weights=weights), environ).folder
    return replace(options, model=folder, revision=None, download_dir=None, hub=None)


def _is_at_hub(options: EngineOptions) -> bool:
    return is_hub_name(options.model) and not Path(options.model).exists()


def _download_job(options: EngineOptions, environ: Mapping[str, str], *, weights: bool) -> DownloadJob:
    return DownloadJob(options.model, hub_of(options, environ), options.revision, options.download_dir, weights)


def _check_not_gguf(options: EngineOptions) -> None:
    """Raise ConfigError if --quantization is gguf, or contradicts the files."""
    if options.quantization == "gguf":
        raise ConfigError(
            f"--quantization gguf, but {options.model or 'the default model'} is neither a .gguf file nor a folder "
            "of only .gguf files"
        )
    _check_quantization(options)


def _check_quantization(options: EngineOptions) -> None:
    """Report a contradiction at the command line, not in an instance's log."""
    if options.quantization is not None and (Path(options.model) / "config.json").is_file():
        from engine.quantization.config import read_quantization_config
        from engine.quantization.requested import check_requested

        path = Path(options.model)
        check_requested(path, options.quantization, read_quantization_config(path))


def print_progress(line: str) -> None:
    """Print a line about a download or conversion to stderr."""
    print(line, file=sys.stderr, flush=True)
