"""--model and --quantization: contradictions, and the flags that processes get for a GGUF file."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.checkpoints.gguf_folder import converted_path
from engine.checkpoints.model_identity import read_json
from flags.options import EngineOptions
from pdserve import cli, model_flags, up_request
from pdserve.hub.download_job import DownloadJob, Snapshot
from pdserve.model_flags import with_plain_model
from tests.engine.tiny_gguf import write_tiny_gguf
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf"), "llama")[0]


@pytest.fixture
def cache(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that already has the model: the conversion is tested with the engine."""
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path))
    converted_path(gguf_file, tmp_path).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("quantization", [None, "gguf"])
def test_the_folder_replaces_the_file_and_the_typed_name_stays(
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


def test_other_models_are_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    options = EngineOptions(model=str(tmp_path), quantization="awq")

    assert with_plain_model(options, {}) == options


def test_flag_and_checkpoint_must_agree_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    script = (
        "import sys; from pdserve.model_flags import with_plain_model; from flags.options import EngineOptions\n"
        "try: with_plain_model(EngineOptions(model=sys.argv[1], quantization='awq'), {})\n"
        "except Exception as error: print('torch' in sys.modules, error)"
    )

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)

    assert done.stdout == f"False --quantization awq, but {tmp_path}/config.json says gptq\n"


def test_flag_and_file_must_agree(tmp_path: Path, gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--quantization awq, but {gguf_file} is GGUF"):
        with_plain_model(EngineOptions(model=str(gguf_file), quantization="awq"), {})
    with pytest.raises(ConfigError, match=rf"--quantization gguf, but {tmp_path} is neither a \.gguf file"):
        with_plain_model(EngineOptions(model=str(tmp_path), quantization="gguf"), {})


@pytest.fixture
def fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DownloadJob]:
    """A hub that returns a complete folder; the list has the jobs it received."""
    folder, requests = tmp_path / "snapshot", list[DownloadJob]()
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')

    def find(wanted: DownloadJob, environ: Mapping[str, str]) -> Snapshot:
        requests.append(wanted)
        return Snapshot(str(folder), "c0ffee")

    monkeypatch.setattr(model_flags, "find_snapshot", find)
    return requests


def test_a_hubs_name_becomes_a_folder_and_stays_a_served_name(fetches: list[DownloadJob], tmp_path: Path) -> None:
    typed = EngineOptions(model="facebook/opt-125m", revision="v1", download_dir="/models", served_model_name=("opt",))

    plain = with_plain_model(typed, {})

    assert fetches == [DownloadJob("facebook/opt-125m", "huggingface", "v1", "/models")]
    assert (plain.model, plain.served_model_name) == (str(tmp_path / "snapshot"), ("opt", "facebook/opt-125m"))
    assert (plain.revision, plain.download_dir, plain.hub) == (None, None, None)


@pytest.mark.parametrize(
    ("typed", "environ", "hub"),
    [
        (None, {}, "huggingface"),
        (None, {"VLLM_USE_MODELSCOPE": "True"}, "modelscope"),
        (None, {"VLLM_USE_MODELSCOPE": "False"}, "huggingface"),
        ("modelscope", {}, "modelscope"),
        ("huggingface", {"VLLM_USE_MODELSCOPE": "True"}, "huggingface"),
    ],
)
def test_the_hub_is_selected_by_the_flag_or_vllms_variables(
    typed: str | None, environ: dict[str, str], hub: str, fetches: list[DownloadJob]
) -> None:
    with_plain_model(EngineOptions(model="a/b", hub=typed), environ)

    assert [one.hub for one in fetches] == [hub]


def test_schedulers_and_fake_engines_fetch_no_weights(fetches: list[DownloadJob]) -> None:
    with_plain_model(EngineOptions(model="a/b"), {}, weights=False)
    with_plain_model(EngineOptions(model="a/b", engine="fake"), {})

    assert [one.weights for one in fetches] == [False, False]


def test_a_folder_is_never_looked_up_at_a_hub(
    fetches: list[DownloadJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "facebook" / "opt-125m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    plain = with_plain_model(EngineOptions(model="facebook/opt-125m", download_dir="/models"), {})

    assert (plain.model, fetches) == ("facebook/opt-125m", [])
    with pytest.raises(ConfigError, match="--revision v1 is for a hub model, but facebook/opt-125m is not one"):
        with_plain_model(EngineOptions(model="facebook/opt-125m", revision="v1"), {})


def test_up_gives_its_processes_the_folder_and_the_name(fetches: list[DownloadJob], tmp_path: Path) -> None:
    request = up_request.parse(["--model", "facebook/opt-125m", "--revision", "main", "--port", "9911"])

    flags = " ".join(request.flags)
    assert f"--model {tmp_path / 'snapshot'} --served-model-name facebook/opt-125m" in flags
    assert "--revision" not in flags


def test_other_nodes_get_the_models_name_and_commit(fetches: list[DownloadJob], tmp_path: Path) -> None:
    request = up_request.parse(
        ["--model", "facebook/opt-125m", "--download-dir", "/m", "--ray", "--address", "10.0.0.1:6379"]
    )

    flags = " ".join(request.flags)
    assert "--model facebook/opt-125m --revision c0ffee --download-dir /m --hub huggingface" in flags
    assert "--served-model-name facebook/opt-125m" in flags
    assert request.engine.model == str(tmp_path / "snapshot")


def test_model_path_prints_no_path_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "path", str(tmp_path / "none")]) == 2

    assert capsys.readouterr() == ("", f"pdserve model: {tmp_path}/none is neither a folder nor a .gguf file\n")


def test_a_missing_file_of_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\S+/config\.json is missing$"):
        read_json(tmp_path / "config.json")
