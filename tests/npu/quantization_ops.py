"""CPU references of the ops for quantised layers and for experts, as torch_npu documents them for A2 and A3."""

import torch

from tests.npu.rules import need, need_contiguous, need_dtype, need_shape, need_unused

_MAX_SIZE = 65_535
_INT8, _QINT8 = 1, 12
_PER_WORD = 8
_NUMBERED = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}  # by torch's dtype numbers


class Dtypes:
    """`also_float32`: a switch of tests, which no NPU has, for comparing whole models with the oracle."""

    also_float32 = False

    @classmethod
    def of_rows(cls) -> tuple[torch.dtype, ...]:
        """The dtypes that the ops take."""
        return (torch.float16, torch.bfloat16, *(torch.float32,) * cls.also_float32)


def dynamic_quant(
    x: torch.Tensor, *, smooth_scales: torch.Tensor | None = None, group_index: torch.Tensor | None = None,
    dst_type: int | None = None, quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """npu_dynamic_quant: each row in int8 scaled by its largest number, and the row's scale."""
    need_unused({"smooth_scales": smooth_scales, "group_index": group_index, "dst_type_max": dst_type_max or None})
    need(dst_type in (None, _INT8), f"dst_type {dst_type}: no reference but for int8")
    need(quant_mode == "pertoken", f"quant_mode {quant_mode!r}: no reference but for pertoken")
    need_dtype(Dtypes.of_rows(), x=x)
    need(x.dim() > 1, "x has one dimension: 2 at least")
    steps = x.double().abs().amax(-1) / 127
    return (x.double() / steps[..., None]).nan_to_num().round().to(torch.int8), steps.float()


def quantize(
    self: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: int, axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:  # fmt: skip
    """npu_quantize by aclnnAscendQuantV3 (op-plugin, QuantizeKernelNpuOpApi.cpp): rounds x * scales + zero_points.

    In float32 whatever the dtypes, to the nearest, ties to even, within int8: Compute and CastOut of ops-nn's
    quant/ascend_quant_v2/op_kernel. Its documents want x, scales and zero_points of one dtype.
    """
    need(not div_mode, "no reference for div_mode")
    need(dtype == _QINT8, f"dtype {dtype}: no reference but for qint8")
    need(axis == -1, f"axis {axis}: no reference but for the last")
    need_dtype(Dtypes.of_rows(), x=self)
    need_dtype((self.dtype,), scales=scales, zero_points=zero_points)
    need(list(scales.shape) in ([1], [self.shape[-1]]), f"scales is {list(scales.shape)}: [1] or [{self.shape[-1]}]")
    values = self.float() * scales.float()
    if zero_points is not None:
        need_shape("zero_points", zero_points, scales.shape)
        values = values + zero_points.float()
    return values.round().clamp(-128, 127).to(torch.int8)


def quant_matmul(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, output_dtype: int | None = None,
    x1_dtype: int | None = None, x2_dtype: int | None = None, pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None, group_sizes: list[int] | None = None, y_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """npu_quant_matmul of two matrices of int8: (x1 @ x2 + bias) * scale * pertoken_scale, as ops-nn's README of
    matmul/quant_batch_matmul_v3 says; float16 without pertoken_scale by int64 scales, of which 19 bits count
    (aclnnTransQuantParamV3.md).
    """
    need_unused(
        {
            "offset": offset, "x1_dtype": x1_dtype, "x2_dtype": x2_dtype, "scale_dtype": scale_dtype,
            "pertoken_scale_dtype": pertoken_scale_dtype, "group_sizes": group_sizes, "y_scale": y_scale,
        }
    )  # fmt: skip
    need_dtype((torch.int8,), x1=x1, x2=x2)
    need(x1.dim() == x2.dim() == 2, f"{x1.dim()} and {x2.dim()} dimensions: no reference but for 2")
    tokens, inputs = x1.shape
    outputs = x2.shape[1]
    need_shape("x2", x2, [inputs, outputs])
    need(max(inputs, outputs) <= _MAX_SIZE, f"{inputs} x {outputs}: {_MAX_SIZE} at most")
    dtype = None if output_dtype is None else _NUMBERED.get(output_dtype)
    need(dtype in Dtypes.of_rows(), f"output_dtype {output_dtype}: no reference but for float16 and bfloat16")
    assert dtype is not None
    need(list(scale.shape) in ([1], [outputs]), f"scale is {list(scale.shape)}: must be [1] or [{outputs}]")
    sums = x1.double() @ x2.double()
    if bias is not None:
        need_dtype((torch.int32,), bias=bias)
        need_shape("bias", bias, [outputs])
        sums = sums + bias
    if pertoken_scale is None:
        return (sums.float() * _static_scale(scale, dtype).float()).to(dtype)
    need_dtype((torch.float32,), pertoken_scale=pertoken_scale)
    need_shape("pertoken_scale", pertoken_scale, [tokens])
    need_dtype((torch.float32, torch.bfloat16) if dtype == torch.bfloat16 else (torch.float32,), scale=scale)
    return (sums * scale.double() * pertoken_scale.double()[:, None]).to(dtype)


def _static_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale as it is multiplied. A float32 one for float16 is documented too, but not in graphs."""
    if dtype != torch.float16:
        need_dtype((torch.float32, torch.bfloat16), scale=scale)
        return scale
    need_dtype((torch.int64,), scale=scale)
    return (scale.to(torch.int32) & -(1 << 13)).view(torch.float32)


def weight_quant_batchmatmul(
    x: torch.Tensor, weight: torch.Tensor, antiquant_scale: torch.Tensor, antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None, quant_offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0, inner_precise: int = 0, weight_dtype: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """npu_weight_quant_batchmatmul: x @ ((weight + offset) * scale), the weight rounded to the dtype of x."""
    need_unused(
        {"quant_scale": quant_scale, "quant_offset": quant_offset, "bias": bias, "weight_dtype": weight_dtype}
    )  # fmt: skip
    need(inner_precise == 0, f"inner_precise {inner_precise}: 1 is for weights in NZ format")
    need_dtype(Dtypes.of_rows(), x=x)
    need_dtype((torch.int8, torch.int32), weight=weight)
    need_dtype((x.dtype,), antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    need(x.dim() == weight.dim() == 2, f"{x.dim()} and {weight.dim()} dimensions: 2 each")
    need(x.numel() > 0, "x is empty")
    codes = weight.double()
    if weight.dtype == torch.int32:
        need_contiguous(weight=weight)  # no reference for a packed weight that is transposed
        codes = _unpack(weight).double()
    inputs, outputs = codes.shape
    need_shape("x", x, [x.shape[0], inputs])
    need(max(inputs, outputs) <= _MAX_SIZE, f"{inputs} x {outputs}: {_MAX_SIZE} at most")
    size = antiquant_group_size
    if size == 0:
        shapes = ([1, outputs], [outputs], [1, 1], [1])
        fits = list(antiquant_scale.shape) in shapes
        need(fits, f"antiquant_scale is {list(antiquant_scale.shape)} without groups: one of {shapes}")
        size = inputs
    else:
        need(size % 32 == 0 and 32 <= size < inputs, f"antiquant_group_size {size}: a multiple of 32 below {inputs}")
        need_shape("antiquant_scale", antiquant_scale, [-(-inputs // size), outputs])
    scales = antiquant_scale.view(-1, antiquant_scale.shape[-1]).double()
    offsets = torch.zeros_like(scales)
    if antiquant_offset is not None:
        need_shape("antiquant_offset", antiquant_offset, antiquant_scale.shape)
        offsets = antiquant_offset.view(scales.shape).double()
    groups = torch.arange(inputs) // size
    plain = ((codes + offsets[groups]) * scales[groups]).to(x.dtype)
    return (x.double() @ plain.double()).to(x.dtype)


def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """npu_convert_weight_to_int4pack: eight numbers of the last dimension in an int32, in the op's own order."""
    need(inner_k_tiles == 0, "inner_k_tiles is reserved")
    need_dtype((torch.int32,), weight=weight)
    need_contiguous(weight=weight)
    need(weight.dim() == 2 and weight.shape[1] % _PER_WORD == 0, f"weight is {list(weight.shape)}: [k, 8 n]")
    need(int(weight.min()) >= -8 and int(weight.max()) <= 7, "weight leaves [-8, 7]")
    fields = (weight.to(torch.int64) & 15).view(len(weight), -1, _PER_WORD) << 4 * torch.arange(_PER_WORD)
    words: torch.Tensor = fields.sum(2).to(torch.uint32).view(torch.int32)
    return words


def int4pack_shape(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """The meta kernel that the wheel lacks."""
    return weight.new_empty(weight.shape[0], weight.shape[1] // _PER_WORD, dtype=torch.int32)


def grouped_matmul(
    x: list[torch.Tensor], weight: list[torch.Tensor], *, bias: object = None,
    scale: list[torch.Tensor] | None = None, offset: object = None, antiquant_scale: object = None,
    antiquant_offset: object = None, per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None, activation_input: object = None,
    activation_quant_scale: object = None, activation_quant_offset: object = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
    tuning_config: object = None, output_dtype: int | None = None, x_dtype: object = None,
    weight_dtype: object = None, scale_dtype: object = None, per_token_scale_dtype: object = None,
) -> list[torch.Tensor]:  # fmt: skip
    """npu_grouped_matmul of one matrix, whose rows are in groups, with one stack of weights [groups, k, n].

    In floats, or in int8 with a scale for each output of each group and one for each row (table 2 of its page).
    """
    need_unused(
        {
            "bias": bias, "offset": offset, "antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset,
            "activation_input": activation_input, "activation_quant_scale": activation_quant_scale,
            "activation_quant_offset": activation_quant_offset, "act_type": act_type or None,
            "tuning_config": tuning_config, "x_dtype": x_dtype, "weight_dtype": weight_dtype,
            "scale_dtype": scale_dtype, "per_token_scale_dtype": per_token_scale_dtype,
        }
    )  # fmt: skip
    need(len(x) == len(weight) == 1, f"{len(x)} and {len(weight)} tensors: no reference but for one of each")
    (rows,), (stack,) = x, weight
    need_dtype((torch.float16, torch.bfloat16, torch.float32, torch.int8), x=rows)
    need_dtype((rows.dtype,), weight=stack)
    need_contiguous(x=rows)
    dtype, scales, steps = _scaling(rows, stack, scale, per_token_scale, output_dtype)
    need(rows.dim() == 2 and stack.dim() == 3, f"{rows.dim()} and {stack.dim()} dimensions: 2 and 3")
    need_shape("x", rows, [len(rows), stack.shape[1]])
    need(max(rows.shape[1], stack.shape[2]) < _MAX_SIZE + 1, f"{list(stack.shape)}: below {_MAX_SIZE + 1}")
    need(len(stack) <= 1024, f"{len(stack)} groups: 1024 at most")
    need(group_type == 0, f"group_type {group_type}: 0 groups the rows")
    need(split_item in (2, 3), f"split_item {split_item}: 2 and 3 give one result")
    need(group_list is not None, "group_list is missing")
    assert group_list is not None
    need_dtype((torch.int64,), group_list=group_list)
    need_shape("group_list", group_list, [len(stack)])
    need(group_list_type in (0, 1), f"group_list_type {group_list_type}: 0 or 1")
    need(group_list_type == 0 or len(group_list) != 1, "group_list has one number: two at least where they are counts")
    ends = group_list.tolist() if group_list_type == 0 else group_list.cumsum(0).tolist()
    need(ends == sorted(ends) and ends[0] >= 0 and ends[-1] == len(rows), f"group_list ends at {ends} of {len(rows)}")
    starts = [0, *ends[:-1]]
    parts = [
        rows[start:end].double() @ plane.double() * scales[group] * steps[start:end]
        for group, (start, end, plane) in enumerate(zip(starts, ends, stack, strict=True))
    ]
    return [torch.cat(parts).to(dtype)]


def _scaling(
    rows: torch.Tensor, stack: torch.Tensor, scale: list[torch.Tensor] | None, steps: list[torch.Tensor] | None,
    output_dtype: int | None,
) -> tuple[torch.dtype, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the dtype of npu_grouped_matmul's result, the scales of outputs by group, and those of rows."""
    if rows.dtype != torch.int8:
        need_unused({"scale": scale, "per_token_scale": steps, "output_dtype": output_dtype})
        return rows.dtype, torch.ones(len(stack), 1, dtype=torch.float64), torch.ones(len(rows), 1, dtype=torch.float64)
    need(scale is not None and len(scale) == 1, "scale is missing")
    need(steps is not None and len(steps) == 1, "no reference without per_token_scale")
    assert scale is not None
    assert steps is not None
    dtype = None if output_dtype is None else _NUMBERED.get(output_dtype)
    need(dtype in Dtypes.of_rows(), f"output_dtype {output_dtype} beside per_token_scale: float16 or bfloat16")
    assert dtype is not None
    need_dtype((torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,), scale=scale[0])
    need_dtype((torch.float32,), per_token_scale=steps[0])
    need_shape("scale", scale[0], [len(stack), stack.shape[2]])
    need_shape("per_token_scale", steps[0], [len(rows)])
    return dtype, scale[0].double(), steps[0].double()[:, None]


def _unpack(words: torch.Tensor) -> torch.Tensor:
    fields = words.view(torch.uint32).to(torch.int64)[..., None] >> 4 * torch.arange(_PER_WORD) & 15
    return torch.where(fields > 7, fields - 16, fields).flatten(1)
