"""int8 through ONNX Runtime, an extra: for ARM without the operators that PyTorch will drop.

Its operator ``QLinearConv`` (of the domain com.microsoft) takes uint8 codes channels last and int8
weights with a scale each, and rounds to uint8 codes. Grids are inputs, so that they may change from
step to step. A linear layer is a 1×1 convolution with its rows as places of one image. The operator
can neither add before it rounds nor return float32: a sum is rounded twice, and maps to float32 run
as the reference does.

A model of one operator is written here byte by byte, in ONNX's protobuf format, to need no other
library for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cocofl.freeze.kernels.base import (
    REFERENCE,
    Geometry,
    Kernel,
    LinearMap,
    Prepared,
    bits_with,
    finished,
    grid_before_adding,
)
from cocofl.numerics import Codes, Grid

_FLOAT, _UINT8, _INT8, _INT32 = 1, 2, 3, 6  # TensorProto.DataType
_INT, _INTS = 2, 7  # AttributeProto.AttributeType
_NUMPY = {_FLOAT: np.float32, _UINT8: np.uint8, _INT8: np.int8}
_INPUTS = {"x": _UINT8, "x_scale": _FLOAT, "y_scale": _FLOAT, "y_zero": _UINT8, "bias": _INT32}
_ORDER = ("x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero", "bias")


def _prepare(linear_map: LinearMap) -> Prepared:
    geometry = linear_map.geometry or Geometry()
    codes, scale, own_bias = linear_map.weight.codes, linear_map.weight.scale, linear_map.bias
    is_linear, relu, channels = linear_map.geometry is None, linear_map.relu, len(codes)
    kernel = (1, 1) if is_linear else (codes.shape[2], codes.shape[3])
    session = _session(_model(linear_map, geometry, kernel))
    in_float = REFERENCE.prepare(linear_map)

    def convolved(x: Codes, out: Grid) -> Tensor:
        values = x.values
        rows = values.reshape(1, -1, 1, values.shape[-1]) if is_linear else values
        image = (rows if is_linear else rows.permute(0, 2, 3, 1)).contiguous()
        sizes = zip(image.shape[1:3], kernel, *_walk(geometry), strict=True)
        places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        y = torch.empty((len(image), *places, channels), dtype=torch.uint8)
        bias = torch.zeros(channels, dtype=torch.int32)
        if own_bias is not None:
            bias = (own_bias / (x.grid.scale * scale)).round_().to(torch.int32)
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, np.uint8, tuple(image.shape), image.data_ptr())
        binding.bind_output("y", "cpu", 0, np.uint8, tuple(y.shape), y.data_ptr())
        binding.bind_cpu_input("x_scale", np.array(x.grid.scale, np.float32))
        binding.bind_cpu_input("y_scale", np.array(out.scale, np.float32))
        binding.bind_cpu_input("y_zero", np.array(out.zero_point, np.uint8))
        binding.bind_cpu_input("bias", bias.numpy())
        session.run_with_iobinding(binding)
        return y.view(*values.shape[:-1], channels) if is_linear else y.permute(0, 3, 1, 2)

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        if out is None:
            return in_float(x, out, addend)
        if addend is None:
            y = convolved(x, out)
            return Codes(y.clamp_(min=out.zero_point) if relu and out.zero_point else y, out)
        wide = grid_before_adding(out, addend)
        part = Codes(convolved(x, wide), wide)
        return finished(part.dequantize(), addend, out, relu=relu)

    return run


def _walk(geometry: Geometry) -> tuple[tuple[int, int], ...]:
    return geometry.stride, geometry.padding, geometry.dilation


def _session(model: bytes) -> Any:
    import onnxruntime  # noqa: PLC0415  # an extra

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # Threads that spin while they wait would take the cores from those of PyTorch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _model(linear_map: LinearMap, geometry: Geometry, kernel: tuple[int, int]) -> bytes:
    """One ``QLinearConv`` as a ModelProto."""
    weight, scale = linear_map.weight.codes, linear_map.weight.scale
    constants = (
        _tensor("x_zero", _UINT8, (), linear_map.input_zero_point),
        _tensor("w", _INT8, (*weight.shape[:2], *kernel), weight.contiguous().numpy()),
        _tensor("w_scale", _FLOAT, tuple(scale.shape), scale.numpy()),
        _tensor("w_zero", _INT8, tuple(scale.shape), np.zeros(len(scale))),
    )
    strides, pads, dilations = _walk(geometry)
    walk = {"strides": strides, "pads": pads * 2, "dilations": dilations, "kernel_shape": kernel}
    attributes = [
        _text(1, name) + b"".join(_number(8, n) for n in numbers) + _number(20, _INTS)
        for name, numbers in walk.items()
    ] + [
        _text(1, name) + _number(3, n) + _number(20, _INT)
        for name, n in (("group", geometry.groups), ("channels_last", 1))
    ]
    names = b"".join(_text(1, name) for name in _ORDER) + _text(2, "y") + _text(4, "QLinearConv")
    node = names + _all(5, attributes) + _text(7, "com.microsoft")
    inputs = [_text(1, n) + _part(2, _part(1, _number(1, kind))) for n, kind in _INPUTS.items()]
    output = _text(1, "y") + _part(2, _part(1, _number(1, _UINT8)))
    graph = _part(1, node) + _text(2, "map") + _all(5, constants) + _all(11, inputs)
    versions = [_number(2, 17), _text(1, "com.microsoft") + _number(2, 1)]
    return _number(1, 9) + _part(7, graph + _part(12, output)) + _all(8, versions)


def _tensor(name: str, kind: int, shape: tuple[int, ...], values: Any) -> bytes:
    content = np.asarray(values, _NUMPY[kind]).tobytes()
    sizes = b"".join(_number(1, size) for size in shape)
    return sizes + _number(2, kind) + _text(8, name) + _part(9, content)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _part(field, text.encode())


def _all(field: int, contents: Iterable[bytes]) -> bytes:
    return b"".join(map(partial(_part, field), contents))


def _missing() -> str | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed: pip install 'cocofl[onnxruntime]'"
    return None


ONNX_RUNTIME = Kernel(
    "onnxruntime",
    _prepare,
    _missing,
    integer=True,
    weight_bits=lambda: bits_with("avx512_vnni", "avx_vnni"),
)
