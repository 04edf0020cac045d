"""An instance refuses what it cannot do before it loads anything, with the value."""

import pytest

from instance.config import InstanceConfig
from wire.errors import ConfigError
from wire.options import EngineOptions
from wire.types import Role


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": ""}, "--model is missing"),
        ({"device": "cuda"}, "--device cuda"),
        ({"device": "npu"}, "--device npu"),
        ({"quantization": "awq"}, "--quantization awq"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"kv_transport": ("hccl",)}, "'hccl' is not one of cuda_ipc, shm, process_group, "),
        ({"kv_links": 0}, "--kv-links is 0, must be at least 1"),
        ({"kv_port_range": "9-1"}, "'9-1'"),
    ],
)
def test_a_flag_that_cannot_be_served_is_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        InstanceConfig(EngineOptions(**{"model": "m", **flags}), Role.DECODE)  # type: ignore[arg-type]
