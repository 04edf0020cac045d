"""The errors for a cluster that cannot be joined."""

import importlib
import socket
import sys

import pytest

from pdserve.ray_cluster.join import check_reachable, load, why
from wire.errors import ConfigError


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"--ray needs Ray: pip install 'pdserve\[ray\]'"):
        load()


def test_ray_is_imported_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("pdserve.ray_cluster")]:
        monkeypatch.delitem(sys.modules, name)

    importlib.import_module("pdserve.ray_site")


@pytest.mark.usefixtures("ray_is_here")
@pytest.mark.long
def test_an_address_without_ray_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--address 127.0.0.1:{port}: cannot connect: "):
        check_reachable(f"127.0.0.1:{port}")


@pytest.mark.usefixtures("ray_is_here")
@pytest.mark.long
def test_an_address_that_never_answers_is_given_up_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--address {address}: no Ray cluster answers there within 3 s"):
            check_reachable(address, timeout_s=3.0)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", "it printed nothing"),
        ("Traceback\n  File\nray.exceptions.RpcError: Timed out\n", "ray.exceptions.RpcError: Timed out"),
        (
            "[x C] loader.cc:115: Check failed: has_token || ignore_mode No token was found. Create one.\n*** Stack\n",
            "No token was found. Create one.",
        ),
    ],
)
def test_the_relevant_part_of_rays_error_is_quoted(message: str, expected: str) -> None:
    assert why(message) == expected


def test_long_words_are_truncated() -> None:
    assert len(why("x" * 1000)) == 400
