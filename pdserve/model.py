"""`pdserve model path`: the folder of the default model, made where it is missing."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.flags.parser import CommandParser
from pdserve.run_folder import default_cache_dir
from wire.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run the command: the path on stdout, progress on stderr."""
    about = "Print the folder of the default model, making it if need be."
    parser = CommandParser(prog="pdserve model", description=about)
    parser.add_argument("what", choices=("path",))
    parser.parse_args(argv)
    print(ensure_default(os.environ))
    return 0


def ensure_default(environ: Mapping[str, str]) -> Path:
    """Return the default model's folder. Raises ConfigError where the engine is not installed."""
    try:
        from engine.default_model import ensure_default_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the default model needs the engine ({error.name} is missing): pip install 'pdserve[engine]', or --model"
        ) from error
    return ensure_default_model(default_cache_dir(environ), _progress)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
