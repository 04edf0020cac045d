"""The flags of `pdserve route` that say how its workers hand off."""

import socket

import pytest

from pdserve.route import make_callbacks, parse
from wire.errors import ConfigError

_NEAR = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
_FAR = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://10.255.255.254:8200")
_LAYERWISE = ("--connector", "ascend-layerwise")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*_NEAR, "--connector", "mooncake"), "--connector mooncake: MooncakeConnector is asked on both workers at"),
        ((*_NEAR, "--connector", "nixl-push"), "--connector nixl-push: NixlPushConnector is asked on both workers at"),
        ((*_NEAR, "--worker-callback", "127.0.0.1:0"), "with --connector auto no worker calls back"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1"), "10.0.0.1 is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:x"), "10.0.0.1:x is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:99999"), "10.0.0.1:99999 is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "10.0.0.1:1/x"), "10.0.0.1:1/x is not HOST:PORT"),
        ((*_NEAR, *_LAYERWISE, "--worker-callback", "0.0.0.0:1"), "an address to listen on, not one to reach a host"),
        ((*_FAR, *_LAYERWISE), "10.255.255.254:8200 is on another host and cannot call back to 127.0.0.1"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_callbacks(parse(words)[0])


def test_a_taken_port_for_callbacks_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = (*_NEAR, *_LAYERWISE, "--worker-callback", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"--worker-callback \d+ on 127.0.0.1: in use"):
            make_callbacks(parse(words)[0])


@pytest.mark.parametrize("connector", ["auto", "nixl", "ascend", "ascend-layerwise"])
def test_these_connectors_are_served(connector: str) -> None:
    make_callbacks(parse((*_NEAR, "--connector", connector))[0])
