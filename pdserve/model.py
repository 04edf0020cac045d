"""`pdserve model path [MODEL]`: the folder of a model, downloaded or converted where it is missing."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flags.options import EngineOptions, from_namespace
from pdserve.flags.parser import CommandParser
from pdserve.model_flags import print_progress, with_plain_model
from pdserve.run_folder import default_cache_dir
from wire.errors import ConfigError

EPILOG = """\
examples:
  pdserve model path                               the default model
  pdserve model path facebook/opt-125m             a model of the hub: the next start need not download it
  pdserve model path Qwen/Qwen3-0.6B --revision main --download-dir /models
"""
_FLAGS = ("revision", "download_dir", "hub")


def main(argv: Sequence[str]) -> int:
    """Print the path on stdout and progress on stderr. Raises ConfigError if there is no such model."""
    parser = CommandParser(
        prog="pdserve model",
        description="Print the folder of a model, downloading or converting it if needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("path",), metavar="path", help="print the folder")
    parser.add_argument("model", nargs="?", metavar="MODEL", default="", help="folder, or name on the hub")
    for field in dataclasses.fields(EngineOptions):
        if field.name in _FLAGS:
            name, metadata = "--" + field.name.replace("_", "-"), field.metadata
            parser.add_argument(name, default=argparse.SUPPRESS, help=metadata["help"], choices=metadata["choices"])
    found = find_folder(os.environ, from_namespace(EngineOptions, parser.parse_args(argv)))
    if not found.exists():
        raise ConfigError(f"{found} is neither a folder nor a .gguf file")
    print(found)
    return 0


def find_folder(environ: Mapping[str, str], options: EngineOptions) -> Path:
    """Return the folder of --model, or of the default model. Raises ConfigError if it cannot be provided."""
    if not options.model:
        return ensure_default(environ)
    return Path(with_plain_model(options, environ).model)


def ensure_default(environ: Mapping[str, str]) -> Path:
    """Return the default model's folder. Raises ConfigError if the engine is not installed."""
    try:
        from engine.checkpoints.default_model import ensure_default_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the default model needs the engine ({error.name} is missing): pip install 'pdserve[engine]', "
            "or set --model"
        ) from error
    return ensure_default_model(default_cache_dir(environ), print_progress)
