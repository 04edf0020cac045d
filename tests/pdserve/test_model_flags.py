"""--model and --quantization: what contradicts, and the flags that every process goes on with for a GGUF file."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.gguf_folder import converted_path
from pdserve import up_request
from pdserve.model_flags import with_plain_model
from tests.engine.tiny_gguf import write_tiny_gguf
from wire.errors import ConfigError
from wire.options import EngineOptions


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf"), "llama")[0]


@pytest.fixture
def cache(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that has the model already: what converts it is tested with the engine."""
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path))
    converted_path(gguf_file, tmp_path).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("quantization", [None, "gguf"])
def test_the_folder_takes_its_place_and_the_name_typed_stays(
    quantization: str | None, cache: Path, gguf_file: Path
) -> None:
    typed = EngineOptions(model=str(gguf_file.parent), served_model_name=("mine",), quantization=quantization)

    plain = with_plain_model(typed, {"PDSERVE_CACHE_DIR": str(cache)})

    assert plain.model == str(converted_path(gguf_file, cache))
    assert plain.served_names()[:2] == ("mine", str(gguf_file.parent))
    assert plain.quantization is None


def test_up_converts_before_it_starts_processes(cache: Path, gguf_file: Path) -> None:
    request = up_request.parse(["--model", str(gguf_file), "--quantization", "gguf", "--port", "9911"])

    flags = " ".join(request.flags)
    assert f"--model {converted_path(gguf_file, cache)}" in flags
    assert f"--served-model-name {gguf_file}" in flags
    assert "--quantization" not in flags


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    options = EngineOptions(model=str(tmp_path), quantization="awq")

    assert with_plain_model(options, {}) == options


def test_flag_and_checkpoint_must_agree_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    script = (
        "import sys; from pdserve.model_flags import with_plain_model; from wire.options import EngineOptions\n"
        "try: with_plain_model(EngineOptions(model=sys.argv[1], quantization='awq'), {})\n"
        "except Exception as error: print('torch' in sys.modules, error)"
    )

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)

    assert done.stdout == f"False --quantization awq, but {tmp_path}/config.json says gptq\n"


def test_flag_and_file_must_agree(tmp_path: Path, gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--quantization awq, but {gguf_file} is GGUF"):
        with_plain_model(EngineOptions(model=str(gguf_file), quantization="awq"), {})
    with pytest.raises(ConfigError, match=rf"--quantization gguf, but {tmp_path} is no \.gguf file"):
        with_plain_model(EngineOptions(model=str(tmp_path), quantization="gguf"), {})
