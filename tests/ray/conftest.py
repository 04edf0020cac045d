"""Models and commands of the tests with a real Ray."""

import importlib.util

import pytest

from tests.cluster.conftest import fake_model, tiny_model  # noqa: F401
from tests.conftest import MISSING


@pytest.fixture
def ray_is_here() -> None:
    """Skip where Ray is not installed: only `scripts/test --all` installs it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"{MISSING}: ray")
