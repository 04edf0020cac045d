"""A rank process on an NPU of CPU tensors, whose sums and links keep HCCL's rules.

python -P -m tests.npu.npu_rank CHANNEL_FD PARENT_PID     (PYTHONPATH: the repository)
"""

import sys

import torch

from devices import npu, table
from engine.attention import npu_fused
from instance.rank_process import main
from kvtransfer.process_group import remote_group
from tests.kvtransfer import hccl_rules
from tests.npu import attention_ops
from tests.npu.npu_on_cpu import NpuKind
from tests.npu.ops import npu_ops

if __name__ == "__main__":
    npu_ops()
    attention_ops.Dtypes.also_float32 = True
    npu_fused.DTYPES = npu_fused.TND_DTYPES = (*npu_fused.TND_DTYPES, torch.float32)
    table.KINDS["npu"] = NpuKind(npu.TRAITS)
    remote_group.PROGRAM = hccl_rules.PROGRAM
    hccl_rules.install(on_host=False)
    sys.exit(main(sys.argv[1:]))
