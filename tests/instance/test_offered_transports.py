"""Which transports an instance offers, and the message for one that it lacks."""

from pathlib import Path

import pytest

from instance.build import build_engine
from instance.offered_transports import check_named, describe_transports
from tests.instance.pair import instance_config
from wire.errors import ConfigError
from wire.types import Role

UNNAMED = tuple(f"{name}: not named in --kv-transport" for name in ("cuda_ipc", "shm"))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((), ("cuda_ipc: the KV pool is host memory", "shm", "tcp")),
        (("tcp",), (*UNNAMED, "tcp")),
        (("tcp", "process_group"), (*UNNAMED, "process_group", "tcp")),
    ],
)
def test_default_and_named_transports_are_listed_best_first(
    named: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    engine, _ = build_engine(instance_config(tmp_path, Role.PREFILL, port=1), print)
    try:
        assert describe_transports(named, engine.memories[0]) == said
    finally:
        engine.close()


def test_a_requested_transport_that_is_missing_is_refused_with_advice(tmp_path: Path) -> None:
    engine, _ = build_engine(instance_config(tmp_path, Role.PREFILL, port=1), print)
    try:
        check_named(("shm", "tcp"), engine.memories[0])
        with pytest.raises(ConfigError) as caught:
            check_named(("tcp", "cuda_ipc"), engine.memories[0])
    finally:
        engine.close()

    assert str(caught.value) == (
        "--kv-transport cuda_ipc: the KV pool is host memory; leave cuda_ipc, which moves KV between the GPUs of a "
        "host, out of --kv-transport on this machine"
    )
