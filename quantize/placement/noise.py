"""The noise of a unit in integers, estimated from its weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ...transforms.graph import constant
from ...transforms.ops import OPS
from ...transforms.plan import Unit

ACTIVATION = 12 * 255.0**2 / 36  # a uniform error of 1/255 of a range of six standard deviations


def noise(unit: Unit, nodes: Mapping[str, ir.Node]) -> float:
    """Return the noise power that uint8 activations and int8 weights add to a unit, over the power of its result.

    Rounding to steps of d adds errors of power d**2 / 12 (Widrow, Statistical analysis of amplitude-quantized
    sampled-data systems, 1961). The steps of the weights are computed per output channel; the range of activations is
    assumed to be six standard deviations.
    """
    activations = len(unit.inputs) / ACTIVATION
    row = OPS[unit.op]
    tensor = constant(nodes[unit.nodes[0]].inputs[1]) if row.kind == "compute" else None
    if tensor is None:
        return activations
    array = np.abs(tensor.numpy().astype(np.float32))
    channels = np.moveaxis(array, row.channel_axis(nodes[unit.nodes[0]]) % array.ndim, 0).reshape(-1, 1)
    channels = channels.reshape(array.shape[row.channel_axis(nodes[unit.nodes[0]]) % array.ndim], -1)
    power = np.square(channels, dtype=np.float64).mean(axis=1)
    step = channels.max(axis=1).astype(np.float64) / 127
    ratio = np.divide(step**2 / 12, power, out=np.zeros_like(power), where=power > 0)
    return activations + float(ratio.mean())
