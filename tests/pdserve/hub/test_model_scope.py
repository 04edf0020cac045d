"""Models of ModelScope, over a stub of its library: the calls to it, and the errors."""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.hub.download_job import MODEL_SCOPE, DownloadJob
from pdserve.hub.model_scope import fetch
from wire.errors import ConfigError

NAME = "qwen/Qwen2-7B"


class Library:
    """`modelscope`, which returns the files of a model that match; `calls` are the arguments it received."""

    def __init__(self, folder: Path, files: tuple[str, ...]) -> None:
        self.folder, self.files = folder, files
        self.calls: list[dict[str, object]] = []
        self.is_reachable = True

    def snapshot_download(
        self, model_id: str, *, revision: str | None, cache_dir: str | None, local_files_only: bool,
        allow_patterns: list[str],
    ) -> str:  # fmt: skip
        self.calls.append(
            {
                "model": model_id,
                "revision": revision,
                "cache": cache_dir,
                "offline": local_files_only,
                "p": allow_patterns,
            }
        )
        if not self.is_reachable and not local_files_only:
            raise ConnectionError("no route")
        if not self.files:
            raise ValueError("the model does not exist")
        self.folder.mkdir(exist_ok=True)
        for file in self.files:
            if any(Path(file).match(pattern) for pattern in allow_patterns):
                (self.folder / file).write_text("{}")
        return str(self.folder)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    def put(*files: str) -> Library:
        made = Library(tmp_path / "snapshot", files)
        module = types.ModuleType("modelscope.hub.snapshot_download")
        module.snapshot_download = made.snapshot_download  # type: ignore[attr-defined]
        for name in ("modelscope", "modelscope.hub"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return made

    return put


def silent(words: str) -> None:
    pass


def job_for(**values: object) -> DownloadJob:
    return DownloadJob(NAME, MODEL_SCOPE, **values)  # type: ignore[arg-type]


@pytest.mark.covers("A2.42")
def test_config_tokenizer_and_safetensors_are_fetched_and_no_code(library: Callable[..., Library]) -> None:
    stub = library("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "m.pth")

    snapshot = fetch(job_for(revision="v1", download_dir="/models"), {}, silent)

    assert {file.name for file in Path(snapshot.folder).iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    (call,) = stub.calls
    assert (call["model"], call["revision"], call["cache"], call["offline"]) == (NAME, "v1", "/models", False)


def test_bin_weights_are_fetched_where_there_are_no_safetensors(library: Callable[..., Library]) -> None:
    library("config.json", "pytorch_model.bin", "training_args.bin")

    snapshot = fetch(job_for(), {}, silent)

    assert {file.name for file in Path(snapshot.folder).iterdir()} == {"config.json", "pytorch_model.bin"}


def test_a_scheduler_fetches_no_weights(library: Callable[..., Library]) -> None:
    library("config.json", "tokenizer.json", "model.safetensors")

    snapshot = fetch(job_for(weights=False), {"HF_HUB_OFFLINE": "1"}, silent)

    assert {file.name for file in Path(snapshot.folder).iterdir()} == {"config.json", "tokenizer.json"}


def test_offline_the_cached_copy_is_used(library: Callable[..., Library]) -> None:
    stub = library("config.json", "model.safetensors")

    fetch(job_for(), {"HF_HUB_OFFLINE": "1"}, silent)

    assert stub.calls[0]["offline"] is True


def test_without_a_network_the_cached_copy_is_used(library: Callable[..., Library]) -> None:
    stub, messages = library("config.json", "model.safetensors"), list[str]()
    stub.is_reachable = False

    snapshot = fetch(job_for(), {}, messages.append)

    assert messages[1] == (
        f"ModelScope did not provide {NAME} (ConnectionError: no route): using the copy in {snapshot.folder}"
    )


def test_the_librarys_error_is_quoted_with_advice(library: Callable[..., Library]) -> None:
    library()

    with pytest.raises(
        ConfigError, match=rf"--model {NAME} is not a local folder, and ModelScope .*does not exist\): check"
    ):
        fetch(job_for(), {}, silent)


def test_a_model_without_weights_is_refused(library: Callable[..., Library]) -> None:
    library("config.json", "model.gguf")

    with pytest.raises(ConfigError, match=rf"{NAME} from ModelScope is incomplete: .* needs config\.json and weights"):
        fetch(job_for(), {}, silent)


@pytest.mark.covers("A2.42")
def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)

    with pytest.raises(
        ConfigError, match=rf"--model {NAME} from ModelScope needs modelscope.*: pip install .pdserve.modelscope"
    ):
        fetch(job_for(), {}, silent)
