"""The scripted model, which thinks and calls tools, served in two ways to the clients: combined, and over P/D."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import FLAGS, serving, serving_pair
from tests.conformance.scripted_model import make_scripted_model

PARSERS = ("--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that answers as scripted."""
    return make_scripted_model(tmp_path_factory.mktemp("clients") / "model")


@pytest.fixture(scope="session")
def combined(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `pdserve serve`."""
    folder = tmp_path_factory.mktemp("serve")
    with serving(model, folder, (*FLAGS, *PARSERS, f"--responses-store={folder / 'responses'}")) as url:
        yield url


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a scheduler before one prefill and one decode instance."""
    folder = tmp_path_factory.mktemp("pair")
    with serving_pair(model, folder, (*FLAGS, *PARSERS, f"--responses-store={folder / 'responses'}")) as url:
        yield url
