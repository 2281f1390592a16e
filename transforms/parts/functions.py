"""The model-local functions of the unfused stages: TensorFlow's quantized nodes, written in standard ONNX operators.

With these functions each stage between the float and the fused model is a runnable ONNX file with few, readable nodes.
A runtime inlines the functions.
"""

from __future__ import annotations

import onnx_ir as ir

from ..int8.qparams import TINY

DOMAIN = "requant"

TEXT = """
<ir_version: 8, opset_import: ["" : {opset}, "requant" : 1]>
holder (float x) => (float y) {{ y = Identity(x) }}

<domain: "requant", opset_import: ["" : {opset}]>
ScaleAndZeroPoint (lo, hi) => (scale, zero_point)
{{
  nothing = Constant <value_float: float = 0.0> ()
  one = Constant <value_float: float = 1.0> ()
  steps = Constant <value_float: float = 255.0> ()
  tiny = Constant <value_float: float = {tiny}> ()
  low = Min (lo, nothing)
  high = Max (hi, nothing)
  above = Div (high, steps)
  under = Div (low, steps)
  step = Sub (above, under)
  constant = Less (step, tiny)
  scale = Where (constant, one, step)
  below = Neg (low)
  offset = Div (below, scale)
  rounded = Round (offset)
  clipped = Clip (rounded, nothing, steps)
  zero_point = Cast <to: int = 2> (clipped)
}}

<domain: "requant", opset_import: ["" : {opset}]>
Rescale (acc, x_scale, w_scale, bias) => (real)
{{
  sums = Cast <to: int = 1> (acc)
  unit = Mul (x_scale, w_scale)
  scaled = Mul (sums, unit)
  real = Add (scaled, bias)
}}

<domain: "requant", opset_import: ["" : {opset}, "requant" : 1]>
Quantize (x, lo, hi) => (q, scale, zero_point)
{{
  scale, zero_point = requant.ScaleAndZeroPoint (lo, hi)
  q = QuantizeLinear (x, scale, zero_point)
}}

<domain: "requant", opset_import: ["" : {opset}, "requant" : 1]>
RequantizationRange (acc, x_scale, w_scale, bias, least, most) => (lo, hi)
{{
  real = requant.Rescale (acc, x_scale, w_scale, bias)
  clipped = Clip (real, least, most)
  lo = ReduceMin <keepdims: int = 0> (clipped)
  hi = ReduceMax <keepdims: int = 0> (clipped)
}}

<domain: "requant", opset_import: ["" : {opset}, "requant" : 1]>
Requantize (acc, x_scale, w_scale, bias, lo, hi) => (q, scale, zero_point)
{{
  real = requant.Rescale (acc, x_scale, w_scale, bias)
  scale, zero_point = requant.ScaleAndZeroPoint (lo, hi)
  q = QuantizeLinear (real, scale, zero_point)
}}
"""


def add_functions(model: ir.Model) -> None:
    """Add the functions of the domain ``requant`` to `model`, in the model's opset.

    ``ScaleAndZeroPoint(lo, hi)`` computes `qparams.asymmetric_u8`. ``Rescale(acc, x_scale, w_scale, bias)`` computes
    ``float(acc) * (x_scale * w_scale) + bias``. ``Quantize``, ``RequantizationRange`` and ``Requantize`` correspond to
    TensorFlow's QuantizeV2, RequantizationRange and Requantize, with the scale and zero point as further outputs.
    """
    source = ir.from_onnx_text(TEXT.format(opset=model.opset_imports.get("", 13), tiny=repr(TINY)))
    for key, function in source.functions.items():
        model.functions.setdefault(key, function)
    model.opset_imports[DOMAIN] = 1


def drop_functions(model: ir.Model) -> None:
    """Remove the functions if no node of the graph calls them."""
    if any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        return
    for key in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[key]
    model.opset_imports.pop(DOMAIN, None)
