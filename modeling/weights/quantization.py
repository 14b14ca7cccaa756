"""Quantised checkpoints: Qwen's block-wise FP8 is read, every other method is refused by name.

Whether a tensor is quantised is decided by its dtype and its scale, never by `modules_to_not_convert`: that list names
things that are no modules and differs from release to release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights.layout import Shape

FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"
_DEFAULT_BLOCK = (128, 128)
_MEND = "use the unquantised or Qwen's block-wise FP8 release"
# Endings that only one method's files have, for folders whose configuration does not say.
_NAME_SIGNS = {
    "GPTQ": (".g_idx",),
    "AWQ or GPTQ": (".qweight", ".qzeros"),
    "compressed-tensors or ModelOpt": (".weight_packed", ".weight_scale", ".weight_zero_point"),
    "bitsandbytes": (".absmax", ".quant_map", ".SCB"),
    "MLX": (".scales", ".biases"),
}


def fp8_block(quantization: Mapping[str, Any] | None, names: Collection[str]) -> tuple[int, int]:
    """Rows and columns that share one FP8 scale, from `quantization_config` ([128, 128] where it does not say).

    Raises InputError, naming the method, where the configuration or the tensor names show another quantisation.
    """
    quantization = quantization or {}
    method = quantization.get("quant_method")
    if method is None and "group_size" in quantization:
        method = "MLX"  # writes {"group_size", "bits"} and names no method
    if method is None:
        for sign, endings in _NAME_SIGNS.items():
            found = next((name for name in names if name.endswith(endings)), None)
            if found is not None:
                raise InputError(f"the checkpoint is quantised with {sign} (it has {found}); {_MEND}")
    elif str(method).lower() != "fp8":
        raise InputError(f"the checkpoint is quantised with {method} (quantization_config.quant_method); {_MEND}")
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise InputError(f"quantization_config.fmt is {quantization['fmt']!r}; only 'e4m3' is read")
    if quantization.get("activation_scheme", "dynamic") != "dynamic":
        scheme = quantization["activation_scheme"]
        raise InputError(f"quantization_config.activation_scheme is {scheme!r}; only 'dynamic' is read")
    block = quantization.get("weight_block_size", _DEFAULT_BLOCK)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise InputError(f"quantization_config.weight_block_size is {block!r}; two sizes are needed ([128, 128])")
    return block[0], block[1]


def refuse_mlx_conversion(shapes: Mapping[str, Shape], kernel: int) -> None:
    """Raise InputError for an MLX conversion: its convolution is [C, kernel, 1] and its norms are shifted by 1."""
    for name, shape in shapes.items():
        if name.endswith("linear_attn.conv1d.weight") and kernel > 1 and shape[1:] == (kernel, 1):
            raise InputError(f"{name} is {list(shape)}: an MLX conversion (its norms are shifted); use the original")


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Shape of the scales of an FP8 tensor [..., R, C]: [..., ceil(R / block[0]), ceil(C / block[1])]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """`weight * scale` in float32, then cast to `dtype`.

    weight is FP8 [R, C], scale [ceil(R / block[0]), ceil(C / block[1])] in any float dtype; edge blocks may be partial.
    One row of blocks at a time, so that no float32 copy of the whole is made.
    """
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype)
    for block_row, scales in enumerate(scale.to(torch.float32)):
        part = slice(block_row * block[0], (block_row + 1) * block[0])
        result[part] = weight[part].to(torch.float32) * scales.repeat_interleave(block[1])[:columns]
    return result
