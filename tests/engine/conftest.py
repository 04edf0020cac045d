"""Runs a module's tests over the fake model twice: computing in launch, and one step ahead of the host.

A module requests it with `pytestmark = pytest.mark.usefixtures("runs_ahead")`.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from testing.engine.fake_model import FakeConfig, FakeModel


@pytest.fixture(params=[False, True], ids=["in-turn", "ahead"])
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make every fake model of the test run ahead, or not."""
    if request.param:
        make: Callable[..., None] = FakeModel.__init__

        def make_ahead(model: FakeModel, config: FakeConfig, *rest: object) -> None:
            make(model, replace(config, runs_ahead=True), *rest)

        monkeypatch.setattr(FakeModel, "__init__", make_ahead)
    return bool(request.param)
