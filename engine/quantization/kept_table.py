"""The formats of linear layers and experts that stay quantised, by the names in a device's traits.

int4pack, int4pack-host   4-bit weights in groups, by torch's kernel for GPUs and by its CPU counterpart
int8, float8              weights of that type, inputs rounded to it token by token
int8-static               int8 weights, inputs rounded by a stored step, as vLLM Ascend does
float8-blocks, widened    float8 with scales by block, by torch's product and by widening (kept_blocks.py)
experts-float8, -widened, npu-experts-int8   experts (kept_experts.py)
npu-int8, npu-int8-static, npu-antiquant     W8A8, dynamic and static, and 4- or 8-bit weights with float inputs, by
                                             torch_npu's ops
"""

from collections.abc import Sequence

from engine.quantization.kept import KeptFormat
from engine.quantization.kept_blocks import BLOCKS_BY_TORCH, WidenedFormat
from engine.quantization.kept_experts import FLOAT8_EXPERTS, ExpertsFormat, RoundedExperts, WidenedExperts
from engine.quantization.kept_int4pack import ON_CARD, ON_HOST, Int4Format
from engine.quantization.kept_npu import STATIC_W8A8, W8A8, AntiquantFormat
from engine.quantization.kept_npu_experts import W8A8_EXPERTS
from engine.quantization.kept_rounded import FLOAT8_BY_TORCH, INT8_BY_TORCH, RoundedFormat
from engine.quantization.kept_static import STATIC_BY_TORCH, StaticFormat

FORMATS: dict[str, KeptFormat] = {
    "int4pack": Int4Format(ON_CARD),
    "int4pack-host": Int4Format(ON_HOST),
    "int8": RoundedFormat(INT8_BY_TORCH),
    "float8": RoundedFormat(FLOAT8_BY_TORCH),
    "int8-static": StaticFormat(STATIC_BY_TORCH),
    "float8-blocks": BLOCKS_BY_TORCH,
    "widened": WidenedFormat(),
    "npu-int8": RoundedFormat(W8A8),
    "npu-int8-static": StaticFormat(STATIC_W8A8),
    "npu-antiquant": AntiquantFormat(),
}


EXPERTS: dict[str, ExpertsFormat] = {
    "experts-float8": RoundedExperts(FLOAT8_EXPERTS),
    "npu-experts-int8": RoundedExperts(W8A8_EXPERTS),
    "experts-widened": WidenedExperts(),
}


def formats_named(names: Sequence[str]) -> tuple[KeptFormat, ...]:
    """Return the formats of linear layers in a device's `kept_linears`, in its order. Raises KeyError if unknown."""
    return tuple(FORMATS[name] for name in names if name not in EXPERTS)


def experts_named(names: Sequence[str]) -> tuple[ExpertsFormat, ...]:
    """Return the formats of experts in a device's `kept_linears`, in its order."""
    return tuple(EXPERTS[name] for name in names if name in EXPERTS)
