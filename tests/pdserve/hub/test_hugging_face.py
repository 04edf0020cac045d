"""Models of the Hugging Face hub: the files fetched, the token sent, and the errors."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pdserve.hub.download_job import DownloadJob, Snapshot
from pdserve.hub.hugging_face import fetch
from tests.pdserve.hub.fake_hub import FakeHub
from wire.errors import ConfigError

OPT, LLAMA, QWEN = "facebook/opt-125m", "meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen2-7B-Instruct"
SMALL = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}", "generation_config.json": "{}"}
BESIDE = {
    ".gitattributes": "", "README.md": "words", "LICENSE": "", "modeling_evil.py": "raise SystemExit",
    "flax_model.msgpack": "f", "tf_model.h5": "t", "rust_model.ot": "r", "training_args.bin": "p",
    "original/consolidated.00.pth": "p", "original/params.json": "{}", "onnx/model.onnx": "o",
}  # fmt: skip


def index(ending: str, *files: str) -> str:
    return json.dumps({"weight_map": {f"w{number}": f"{file}.{ending}" for number, file in enumerate(files)}})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    repos: Mapping[str, Mapping[str, str]] = {
        OPT: {"config.json": "{}", "vocab.json": "{}", "merges.txt": "", "pytorch_model.bin": "weights", **BESIDE},
        LLAMA: {
            **SMALL, **BESIDE, "model.safetensors.index.json": index("safetensors", "model-1-of-2", "model-2-of-2"),
            "model-1-of-2.safetensors": "1", "model-2-of-2.safetensors": "2", "consolidated.safetensors": "twice",
            "pytorch_model.bin.index.json": index("bin", "pytorch_model-1-of-1"), "pytorch_model-1-of-1.bin": "p",
        },
        QWEN: {**SMALL, "model.safetensors": "w", "modules.json": "[]", "1_Pooling/config.json": "{}"},
    }  # fmt: skip
    for name, files in repos.items():
        for number, (file, text) in enumerate(files.items()):
            path = tmp_path / "repos" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + " " * number)  # the cache stores equal contents once
    with FakeHub({name: tmp_path / "repos" / name for name in repos}) as served:
        yield served


@pytest.fixture
def fetched(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Snapshot]:
    """Fetch a model into a cache of the test; `lines` are the messages."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-login"))

    def call(
        name: str, lines: list[str] | None = None, environ: Mapping[str, str] | None = None, **requested: object
    ) -> Snapshot:
        wanted = DownloadJob(name, **{"download_dir": str(tmp_path / "cache"), **requested})  # type: ignore[arg-type]
        return fetch(wanted, {"HF_ENDPOINT": hub.url, **(environ or {})}, (lines if lines is not None else []).append)

    return call


def files_of(snapshot: Snapshot) -> set[str]:
    folder = Path(snapshot.folder)
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (OPT, {"config.json", "vocab.json", "merges.txt", "pytorch_model.bin"}),
        (LLAMA, {*SMALL, "model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors"}),
        (QWEN, {*SMALL, "model.safetensors", "modules.json", "1_Pooling/config.json"}),
    ],
)
def test_only_files_that_a_server_reads_are_fetched(
    name: str, files: set[str], hub: FakeHub, fetched: Callable[..., Snapshot]
) -> None:
    snapshot = fetched(name)

    assert files_of(snapshot) == files
    assert snapshot.commit == hub.commit(name) == Path(snapshot.folder).name
    assert sorted(hub.fetched) == sorted(files)


def test_an_instance_fetches_the_weights_a_scheduler_left_out(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    scheduler = fetched(QWEN, weights=False)
    assert "model.safetensors" not in hub.fetched
    before = len(hub.fetched)

    instance = fetched(QWEN)

    assert scheduler == instance
    assert hub.fetched[before:] == ["model.safetensors"]


def test_cached_files_are_not_fetched_again_or_mentioned(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    first, messages = fetched(OPT), list[str]()
    before = len(hub.fetched)

    assert fetched(OPT, messages) == first
    assert (hub.fetched[before:], messages) == ([], [])


def test_a_download_prints_size_and_folder(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    messages: list[str] = []

    snapshot = fetched(OPT, messages)

    assert messages[0] == f"downloading {OPT} from {hub.url}: 4 files, 0.0 MB, commit {hub.commit(OPT)[:12]}"
    assert messages[-1].startswith(f"downloaded {OPT} in ")
    assert messages[-1].endswith(snapshot.folder)


@pytest.mark.parametrize("kind", ["variable", "login"])
def test_the_token_is_sent(
    kind: str, hub: FakeHub, fetched: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.needs_token.add(LLAMA)
    with pytest.raises(ConfigError, match=rf"{hub.url} has no such model, or it is private: .*set HF_TOKEN"):
        fetched(LLAMA)
    hub.seen.clear()
    if kind == "variable":
        monkeypatch.setenv("HF_TOKEN", hub.token)
    else:
        from huggingface_hub import constants

        (tmp_path / "login").write_text(hub.token)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login"))

    fetched(LLAMA)

    assert {token for _, _, token in hub.seen} == {hub.token}


def test_a_gated_model_is_an_error_with_advice(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    hub.gated.add(LLAMA)

    with pytest.raises(ConfigError) as refusal:
        fetched(LLAMA)
    assert str(refusal.value) == (
        f"{LLAMA} is gated: accept its conditions at {hub.url}/{LLAMA}, then set HF_TOKEN to a token that may read it, "
        "or log in with `hf auth login`"
    )


def test_a_name_unknown_to_the_hub_is_an_error(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    with pytest.raises(ConfigError, match=r"--model facebook/opt-125 is not a local folder, and .* has no such model"):
        fetched("facebook/opt-125")


def test_a_revision_is_a_name_or_a_commit(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    commit = hub.commit(OPT)

    assert fetched(OPT, revision="v1.0") == fetched(OPT, revision=commit) == fetched(OPT)
    with pytest.raises(ConfigError, match=rf"{OPT} has no revision 'v9' at {hub.url}"):
        fetched(OPT, revision="v9")


@pytest.mark.parametrize("how", ["unreachable", "offline"])
def test_without_a_hub_the_cached_copy_is_used(how: str, hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    first, messages = fetched(OPT), list[str]()
    environ = {"HF_HUB_OFFLINE": "1"} if how == "offline" else {}
    if how == "unreachable":
        hub.close()

    assert fetched(OPT, messages, environ) == first
    assert len(messages) == (how == "unreachable")
    assert all("cannot be reached" in words and first.folder in words for words in messages)


def test_without_hub_and_copy_the_error_has_advice(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    words = (
        rf"--model {QWEN} is not a local folder; HF_HUB_OFFLINE is set, and no copy is cached: run `pdserve model path"
    )

    with pytest.raises(ConfigError, match=words):
        fetched(QWEN, environ={"HF_HUB_OFFLINE": "1"})
    fetched(QWEN, weights=False)
    with pytest.raises(ConfigError, match="is incomplete: run `pdserve model path"):
        fetched(QWEN, environ={"HF_HUB_OFFLINE": "1"})


def test_a_repository_without_a_model_is_refused(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    folder = hub.repos[QWEN]
    (folder / "model.safetensors").rename(folder / "model-q4.gguf")
    with pytest.raises(
        ConfigError, match=r"nor an index of several; it has only model-q4\.gguf: download one, and pass its"
    ):
        fetched(QWEN)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json: it cannot be served"):
        fetched(QWEN)


def test_an_index_with_invalid_or_missing_files_is_refused(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    file = hub.repos[LLAMA] / "model.safetensors.index.json"
    file.write_text(index("safetensors", "../../model"))
    with pytest.raises(ConfigError, match=r"weight_map lists '\.\./\.\./model\.safetensors', not \.safetensors files"):
        fetched(LLAMA)
    file.write_text(index("safetensors", "gone"))
    with pytest.raises(ConfigError, match=r"lists gone\.safetensors, which the repository lacks"):
        fetched(LLAMA)


def test_large_files_are_listed_one_by_one(hub: FakeHub, fetched: Callable[..., Snapshot]) -> None:
    (hub.repos[QWEN] / "model.safetensors").write_bytes(bytes(10_500_000))
    messages: list[str] = []

    fetched(QWEN, messages)

    assert messages[1] == "downloaded model.safetensors (7 of 7 files, 10.5 MB of 10.5 MB)"


def test_an_unwritable_folder_is_named(fetched: Callable[..., Snapshot], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=rf"{OPT} cannot be stored here: .*{tmp_path}/file"):
        fetched(OPT, download_dir=str(tmp_path / "file"))


def test_without_the_library_the_error_says_how_to_install_it(
    fetched: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(
        ConfigError, match=rf"--model {OPT} is not a local folder, and downloading it needs huggingface_hub: pip"
    ):
        fetched(OPT)
