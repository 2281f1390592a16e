"""Float operators that a runtime computes in the kernel of the product before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.quantize.placement.costs import signature
from requant.quantize.placement.facts import Facts, facts_of
from requant.quantize.placement.followers import followers_of
from requant.quantize.placement.forms import all_int8_plan, possible_forms
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime.attribution import Owners
from requant.quantize.runtime.profile import KernelRun
from requant.transforms.int8.plan import Impl

# A squeeze-and-excitation block of EfficientNet: the gate reads the SiLU and a product of its mean.
BLOCK = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1,8,8,8] x) => (float[1,8,8,8] y) {
  [first] a = Conv <pads = [1, 1, 1, 1]> (x, w)
  [sigmoid] s = Sigmoid (a)
  [silu] b = Mul (a, s)
  [mean] m = GlobalAveragePool (b)
  [squeeze] c = Conv (m, v)
  [excite] e = Sigmoid (c)
  [gate] d = Mul (e, b)
  [last] y = Conv <pads = [1, 1, 1, 1]> (d, u)
}"""
IMAGE, POINT = (1, 8, 8, 8), (1, 8, 1, 1)
SHAPES = {**dict.fromkeys("xasbdy", IMAGE), **dict.fromkeys("mce", POINT)}


def block(text: str = BLOCK) -> tuple[ir.Model, Facts]:
    """Return the block and its facts for other runtimes."""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for name, size in {"w": 3, "v": 1, "u": 3}.items():
        array = random.normal(size=(8, 8, size, size)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    made = ir.from_proto(proto)
    for value in (v for node in made.graph for v in node.outputs):
        value.shape, value.dtype = ir.Shape(SHAPES[str(value.name)]), ir.DataType.FLOAT
    return made, replace(facts_of(made), static=True, portable=True, ranges=dict.fromkeys(SHAPES, (-1.0, 1.0)))


def followers(text: str = BLOCK, shapes: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the names of followers with those of their products."""
    made, facts = block(text)
    plan = choose_by(facts, made)
    found = followers_of(plan.units, possible_forms(facts, plan), SHAPES if shapes is None else shapes)
    return {name: product.name for name, product in found.items()}


def test_a_function_of_one_product_follows_it_and_a_gate_does_not() -> None:
    assert followers() == {"silu": "first", "excite": "squeeze"}


def test_without_shapes_nothing_follows() -> None:
    assert followers(shapes={}) == {}


def test_a_product_that_another_unit_reads_has_no_follower() -> None:
    shared = BLOCK.replace("Mul (e, b)", "Mul (e, a)")
    assert followers(shared) == {"excite": "squeeze"}


@pytest.mark.parametrize(
    ("members", "owner"),
    [
        (("first", "sigmoid", "silu", "b/quantize"), "first"),
        (("Convert_12", "a/dequantize", "sigmoid", "silu"), "first"),
        (("Convert_7", "c/dequantize", "excite", "gate", "d/quantize"), "gate"),
        (("d/dequantize", "y/quantize"), "last"),
        (("Convert_3",), None),
    ],
    ids=["one kernel", "apart", "the last node counts", "conversions alone", "nothing"],
)
def test_the_time_of_followers_is_that_of_their_product(members: tuple[str, ...], owner: str | None) -> None:
    made, facts = block()
    owners = Owners(made, choose_by(facts, made).units, followers())
    assert owners.owner(KernelRun("0: x", "", "Subgraph", 1.0, 0, (), members=members)) == owner


def test_the_cost_of_a_product_is_that_with_its_followers() -> None:
    made, facts = block()
    unit = choose_by(facts, made).units[0]
    alone, with_silu = (signature(unit, facts.nodes, SHAPES, behind) for behind in ((), ("sigmoid", "silu")))
    assert unit.name == "first"
    assert alone != with_silu
    assert with_silu != signature(unit, facts.nodes, SHAPES, ("sigmoid",))


def test_products_of_a_portable_plan_write_float_where_nothing_reads_uint8() -> None:
    made, facts = block()
    rules = choose_by(facts, made)
    everything = all_int8_plan(facts, rules)
    impls = {unit.name: everything.impl(unit) for unit in everything.units}
    assert impls["first"] is impls["squeeze"] is impls["last"] is Impl.U8_FLOAT
    assert impls["mean"] is Impl.U8
    assert possible_forms(facts, rules)["first"] == (Impl.FLOAT, Impl.U8, Impl.U8_FLOAT)
    stock = replace(facts, portable=False)
    assert Impl.U8_FLOAT not in possible_forms(stock, choose_by(stock, made))["first"]
