"""Which texts can be the name of a model at a hub, and which only a path."""

import pytest

from pdserve.hub.download_job import DownloadJob, Snapshot, is_hub_name
from wire.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    ["facebook/opt-125m", "gpt2", "NousResearch/Meta-Llama-3.1-8B-Instruct", "Qwen/Qwen2_5-0.5B", "a/b", "0x/1.0_"],
)
def test_names_of_models_are_recognised(text: str) -> None:
    assert is_hub_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "/models/opt", "./opt", "../opt", "~/opt", "a/b/c", "a/", "/a", "models/x.gguf", "a//b", "a b", "a..b/c",
        "a--b/c", "é/b", "a/b\n", "-a/b", "x" * 98, "model.safetensors",
    ],
)  # fmt: skip
def test_paths_and_invalid_names_are_not_models_of_a_hub(text: str) -> None:
    assert not is_hub_name(text)


def test_both_sides_read_what_the_other_wrote() -> None:
    requested = DownloadJob("a/b", revision="v1", weights=False)

    assert DownloadJob.from_json(requested.to_json()) == requested
    assert Snapshot.from_json(Snapshot("/f", "c").to_json()) == Snapshot("/f", "c")
    with pytest.raises(ConfigError, match=r"^no such model$"):
        Snapshot.from_json('{"refused": "no such model"}')
