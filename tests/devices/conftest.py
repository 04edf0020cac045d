"""The fixtures that run a test on every device in turn."""

import pytest

from devices.interface import Device
from tests.devices.every_device import ACCELERATORS, DEVICES, EVERY, open_device


@pytest.fixture(params=EVERY)
def device(request: pytest.FixtureRequest) -> Device:
    """Each device that this machine has; the others are skipped by name."""
    return open_device(request.param)


@pytest.fixture(params=list(DEVICES))
def any_device(request: pytest.FixtureRequest) -> Device:
    """Each device, also with the backends that other tests use only in `scripts/test --all`: for the broadest tests."""
    return open_device(request.param)


@pytest.fixture(params=ACCELERATORS)
def accelerator(request: pytest.FixtureRequest) -> Device:
    """Each device but the CPU itself."""
    return open_device(request.param)
