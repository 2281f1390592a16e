"""The input of the placement rules: a model's nodes and tensors, the user's selection, ranges and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import node_name, nodes_by_name
from ...transforms.int8.existing import is_finished
from ...transforms.int8.plan import Impl
from ...transforms.int8.qparams import BlockForm
from ...transforms.quantize_caches import cache_nodes
from ..options.options import Options
from ..options.policy import Policy
from ..options.selection import Selection
from .divisors import divisors_of

FIRST_INTEGER_OPSET = 10  # the opset that introduced QLinearConv and QLinearMatMul


@dataclass(frozen=True)
class Facts:
    """The input of the rules.

    Attributes:
        nodes: The nodes of the graph and its bodies by name.
        types: Their operator types in the user's model, by name.
        values: Their tensors by name, with types and shapes as far as they can be inferred.
        selection: The nodes and operators that the user allows in int8.
        static: Whether there are ranges, or will be after calibration.
        ranges: Observed (lo, hi) by tensor; empty before calibration.
        kept_float: Tensors that must not be uint8, with the reason.
        opset: The model's version of the standard operators.
        signed: Whether activations are int8.
        allow_slow: Whether units may become int8 that the rules expect to be slower.
        zero_points: Whether int8 weights may have a zero point.
        portable: Whether the model is for other runtimes too.
        native: Whether units may be native operators.
        attention: Whether attention is one unit.
        exact: Whether native operators must compute bit for bit what their bodies compute. Then there are none for
            ConvTranspose, interpolation and products that find ranges at run time, and none absorbs another.
        blocks: The form of weights in blocks.
        noise_of: By form of matrix products from float to float, the noise at the outputs by input tensor.
        harmed_by: By such a form, the input tensors that ruin an output, with the reason.
        noise_of_weights: By unit, the noise at the outputs that its int8 weights add.
        finished: Whether requant has quantized the model before.
        caches: The nodes that turn caches in bytes into floats and back, by name.
    """

    nodes: Mapping[str, ir.Node]
    types: Mapping[str, str]
    values: Mapping[str, ir.Value]
    selection: Selection
    static: bool = True
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kept_float: Mapping[str, str] = field(default_factory=dict)
    opset: int = FIRST_INTEGER_OPSET
    signed: bool = False
    allow_slow: bool = False
    zero_points: bool = False
    portable: bool = False
    native: bool = False
    attention: bool = False
    exact: bool = False
    blocks: BlockForm = field(default_factory=BlockForm)
    noise_of: Mapping[Impl, Mapping[str, float]] = field(default_factory=dict)
    harmed_by: Mapping[Impl, Mapping[str, str]] = field(default_factory=dict)
    noise_of_weights: Mapping[str, float] = field(default_factory=dict)
    finished: bool = False
    caches: frozenset[str] = frozenset()

    @cached_property
    def convolves(self) -> bool:
        """Whether there is a convolution, so that tensors of four axes are images."""
        return any(node.op_type == "Conv" for node in self.nodes.values())

    @cached_property
    def divisors(self) -> frozenset[str]:
        """The tensors that must not be written in uint8 because an operator divides by them; see `divisors_of`."""
        return divisors_of(self.nodes.values())


def facts_of(
    model: ir.Model,
    selection: Selection | None = None,
    types: Mapping[str, str] | None = None,
    activation: str = "u8",
) -> Facts:
    """Return the input of the rules for a simplified model; arguments as of `choose`."""
    nodes = nodes_by_name(model)
    return Facts(
        nodes=nodes,
        types={name: (types or {}).get(name, node.op_type) for name, node in nodes.items()},
        values=inferred(model, bodies=True),
        selection=selection or Selection(),
        opset=model.opset_imports.get("", FIRST_INTEGER_OPSET),
        signed=activation == "s8",
        finished=is_finished(model),
        caches=frozenset(map(node_name, cache_nodes(model.graph))),
    )


def asked_facts(
    model: ir.Model, selection: Selection, types: Mapping[str, str], options: Options, policy: Policy
) -> Facts:
    """Return the input of the rules for a simplified model and the user's options, before anything is observed."""
    return replace(
        facts_of(model, selection, types, options.scheme.activation),
        zero_points=policy.zero_points,
        portable=policy.portable,
        native=policy.native,
        attention=policy.attention,
        exact=options.kernels == "exact",
        blocks=options.scheme.blocks,
    )
