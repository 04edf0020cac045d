"""What an instance says of the transports that it does not offer."""

from pathlib import Path

import pytest

from instance.build import build_engine
from instance.offers import check_named, describe_transports
from tests.instance.pair import instance_config
from wire.errors import ConfigError
from wire.types import Role

OTHERS = ("process_group: not named in --kv-transport", "mooncake: not named in --kv-transport")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((), ("cuda_ipc: the KV pool is host memory", "shm", *OTHERS, "tcp")),
        (("tcp",), (*(f"{one}: not named in --kv-transport" for one in ("cuda_ipc", "shm")), *OTHERS, "tcp")),
    ],
)
def test_every_transport_is_named_best_first_with_the_reason(
    named: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    engine, _ = build_engine(instance_config(tmp_path, Role.PREFILL, port=1), print)
    try:
        assert describe_transports(named, engine.memories[0]) == said
    finally:
        engine.close()


def test_a_named_one_that_is_lacking_is_refused_with_what_to_do(tmp_path: Path) -> None:
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
