"""An instance refuses flags that it cannot serve before it loads anything, with the value."""

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from wire.errors import ConfigError
from wire.types import Role


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": ""}, "--model is missing"),
        ({"device": "tpu"}, "--device .tpu. is not one of auto, cpu, cuda, npu"),
        (
            {"device": "cpu", "attention_backend": "cuda"},
            "--attention-backend 'cuda' is not one of auto, cpu, reference, the backends of --device cpu",
        ),
        (
            {"device": "npu", "attention_backend": "cpu"},
            "is not one of auto, npu, reference, the backends of --device npu",
        ),
        ({"quantization": "int3"}, "--quantization 'int3' is not one of awq, gptq, smoothquant, compressed-tensors"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        (
            {"kv_transport": ("rdma",)},
            "'rdma' is not one of cuda_ipc, shm, mooncake, process_group, tcp, ascend, gloo, nccl, hccl",
        ),
        ({"device": "cpu", "kv_transport": ("hccl",)}, "^--kv-transport hccl: a KV pool on cpu uses gloo$"),
        ({"kv_links": 0}, "--kv-links is 0, but must be 1 to 64"),
        ({"kv_links": 65}, "--kv-links is 65, but must be 1 to 64"),
        ({"kv_cache_memory": 0}, "--kv-cache-memory is 0, but must be at least 1"),
        ({"max_model_len": 1}, "--max-model-len is 1, but must be at least 2"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"rank_timeout": 0.5}, "--rank-timeout is 0.5, but must be 1 to 3600"),
        ({"rank_timeout": float("nan")}, "--rank-timeout is nan, but must be 1 to 3600"),
        ({"gpu_memory_utilization": 1.5}, r"--gpu-memory-utilization is 1.5, but must be in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization is nan"),
        ({"http_port": 65536}, "--http-port is 65536, but must be 1 to 65535"),
        ({"kv_port_range": "9-1"}, "'9-1'"),
        ({"kv_port_range": "1-65536"}, "'1-65536'"),
        ({"kv_port_range": "²-9"}, "must be FIRST-LAST"),
        ({"kv_port_range": "9" * 5000}, "must be FIRST-LAST"),
    ],
)
def test_a_flag_that_cannot_be_served_is_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        InstanceConfig(EngineOptions(**{"model": "m", **flags}), Role.DECODE)  # type: ignore[arg-type]
